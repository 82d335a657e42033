"""The dump of a rollout step: one JSON line for each exported context, and one for each session that has none."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import msgspec

from silva.store.dump_line import DumpLine, DumpRequest
from silva.store.files import whole_file
from silva.store.queries import Context, load_contexts
from silva.store.stored import unpack_output
from silva.types import ConfigError, JsonObject, Mode

PLACEHOLDER = "{rollout_id}"
MAX_OUTPUT = 1 << 16
"""Bytes of an agent's output that a line holds; of a larger one only the length is written."""
_OF_SAMPLE = (
    *("name", "node_id", "num_turns", "truncated", "reward", "helpers", "credit", "metadata", "prompt_len"),
    *("token_ids", "loss_mask", "logprobs", "kept_mass"),
)
"""Fields that a line takes from the sample of its context as they are."""


def check_dump_template(template: str, flag: str = "--save-debug-rollout-data") -> None:
    """ConfigError unless the path contains `{rollout_id}` and no other placeholder."""
    others = re.findall(r"\{[^{}]*\}|[{}]", template.replace(PLACEHOLDER, ""))
    if PLACEHOLDER not in template or others:
        found = f"it holds {others[0]}" if others else "it holds none"
        raise ConfigError(
            f"{flag} {template}: the path needs the placeholder {PLACEHOLDER}, and may hold no other; {found}"
        )


def dump_path(template: str, rollout_id: int) -> Path:
    """The file of one rollout step."""
    check_dump_template(template)
    return Path(template.replace(PLACEHOLDER, str(rollout_id)))


def write_rollout_dump(
    path_template: str, rollout_id: int, conn: sqlite3.Connection, *, mode: Mode | None = None
) -> Path:
    """Write the dump of the groups of a rollout step (of one mode, or both) and return its path.

    A group belongs to the step that trained it or gave it up, and until then to the one in which it was started.

    `conn` reads the ledger (`open_run`). A line holds the row's input and label, what became of its prompt, the
    session's ids, status, reason and error, output, timing, requests, turns, aborts and weight versions, and, of an
    exported context, its name, conversation, state key, reward, credit, metadata and the per-token lists. A file
    appears whole or not at all; its parent directories are made.
    """
    path = dump_path(path_template, rollout_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        for row in session_rows(conn, rollout_id, mode):
            for line in session_lines(conn, row, load_contexts(conn, row.session_id)):
                file.write(line.encode())
    return path


def session_rows(conn: sqlite3.Connection, rollout_id: int, mode: Mode | None = None) -> list[DumpLine]:
    """The lines of each session of a rollout step without their contexts: group by group, slot by slot, try by try."""
    rows = conn.execute(
        "SELECT g.step AS rollout_id, g.start_step, g.train_step, "
        "g.prompt_id, p.dataset, p.epoch, p.row, p.position, p.state AS prompt_state, "
        "p.reason AS prompt_reason, g.group_id, g.attempt, g.n AS group_size, s.session_id, s.slot, "
        "s.try_index, s.mode, s.status, s.reason, s.error, s.reward AS session_reward, "
        "s.metadata AS session_metadata, s.started_s, s.ended_s "
        "FROM sessions s JOIN groups g USING (group_id) JOIN prompts p USING (prompt_id) "
        "WHERE g.step = ? AND (? IS NULL OR g.mode = ?) ORDER BY g.rowid, s.slot, s.try_index",
        (rollout_id, mode, mode),
    )
    return [DumpLine(**{**dict(row), "session_metadata": json.loads(row["session_metadata"])}) for row in rows]


def session_lines(conn: sqlite3.Connection, head: DumpLine, contexts: Sequence[Context]) -> list[DumpLine]:
    """The lines of one session: one per context, or one without any."""
    (content,) = conn.execute("SELECT input FROM prompts WHERE prompt_id = ?", (head.prompt_id,)).fetchone()
    given: JsonObject = json.loads(content)
    output = _output(conn, head.session_id)
    turns, aborts = conn.execute(
        "SELECT count(*), coalesce(sum(num_aborts), 0) FROM nodes WHERE session_id = ? AND kind = 'response'",
        (head.session_id,),
    ).fetchone()
    low, high = conn.execute(
        "SELECT min(weight_version), max(weight_version) FROM attempts WHERE session_id = ?", (head.session_id,)
    ).fetchone()
    requests = conn.execute(
        f"SELECT {', '.join(DumpRequest.__struct_fields__)} FROM requests WHERE session_id = ? ORDER BY seq",
        (head.session_id,),
    )
    session = msgspec.structs.replace(
        head,
        label=given.pop("label", None),
        input=given,
        output=output.decode(errors="backslashreplace") if output is not None and len(output) <= MAX_OUTPUT else None,
        output_len=None if output is None else len(output),
        session_turns=turns,
        num_aborts=aborts,
        min_weight_version=low,
        max_weight_version=high,
        requests=[DumpRequest(**dict(request)) for request in requests],
    )
    return [_with_context(session, context) for context in contexts] or [session]


def _output(conn: sqlite3.Connection, session_id: str) -> bytes | None:
    """What the agent wrote as its result; nothing where that is damaged."""
    (packed,) = conn.execute("SELECT output FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
    try:
        return None if packed is None else unpack_output(packed)
    except ValueError:
        return None


def _with_context(session: DumpLine, context: Context) -> DumpLine:
    sample = context.sample
    return msgspec.structs.replace(
        session,
        **{name: getattr(sample, name) for name in _OF_SAMPLE},
        state_key=context.state_key,
        messages=context.messages,
        tools=context.tools,
        chat_template_kwargs=context.template_kwargs,
        response_credits=None if sample.response_credits is None else list(sample.response_credits),
        weight_spans=[(span.start, span.length, span.version) for span in sample.version_spans],
        responses=[(span.node_id, span.start, span.length) for span in sample.responses],
        images=list(sample.images),
    )
