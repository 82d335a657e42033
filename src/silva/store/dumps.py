"""The dump of a rollout step: one JSON line for each exported context, and one for each session that has none."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from silva.store.encode import to_json
from silva.store.files import whole_file
from silva.store.queries import load_samples
from silva.types.errors import ConfigError
from silva.types.rollout import Mode, TrainingSample

PLACEHOLDER = "{rollout_id}"


def check_dump_template(template: str) -> None:
    """ConfigError unless the path holds `{rollout_id}` and no other placeholder."""
    others = re.findall(r"\{[^{}]*\}|[{}]", template.replace(PLACEHOLDER, ""))
    if PLACEHOLDER not in template or others:
        found = f"it holds {others[0]}" if others else "it holds none"
        raise ConfigError(
            f"--save-debug-rollout-data {template}: the path needs the placeholder {PLACEHOLDER}, "
            f"and may hold no other; {found}"
        )


def dump_path(template: str, rollout_id: int) -> Path:
    """The file of one rollout step."""
    check_dump_template(template)
    return Path(template.replace(PLACEHOLDER, str(rollout_id)))


def write_rollout_dump(
    path_template: str, rollout_id: int, conn: sqlite3.Connection, *, mode: Mode | None = None
) -> Path:
    """Write the dump of the groups that were started in a rollout step (of one mode, or both) and return its path.

    `conn` reads the ledger (`open_run`). A line holds the session's ids, status, reason and error, its timing,
    requests, turns, aborts and weight versions, and, of an exported context, name, state key, reward, credit, metadata
    and the per-token lists. A file appears whole or not at all; its parent directories are made.
    """
    path = dump_path(path_template, rollout_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        for line in _lines(conn, rollout_id, mode):
            file.write(to_json(line).encode() + b"\n")
    return path


def _lines(conn: sqlite3.Connection, rollout_id: int, mode: Mode | None) -> Iterator[dict[str, Any]]:
    sessions = conn.execute(
        "SELECT g.rollout_id, g.prompt_id, p.dataset, p.epoch, p.row, g.group_id, g.attempt, s.session_id, s.slot, "
        "s.try_index, s.mode, s.status, s.reason, s.error, s.reward AS session_reward, "
        "s.metadata AS session_metadata, s.started_s, s.ended_s "
        "FROM sessions s JOIN groups g USING (group_id) JOIN prompts p USING (prompt_id) "
        "WHERE g.rollout_id = ? AND (? IS NULL OR g.mode = ?) ORDER BY g.rowid, s.slot, s.try_index",
        (rollout_id, mode, mode),
    ).fetchall()
    for row in sessions:
        session = {
            **dict(row),
            "session_metadata": json.loads(row["session_metadata"]),
            **_work(conn, row["session_id"]),
        }
        samples = load_samples(conn, row["session_id"])
        for sample in samples:
            yield {**session, **_context(conn, sample)}
        if not samples:
            yield {**session, **_NO_CONTEXT}


def _work(conn: sqlite3.Connection, session_id: str) -> dict[str, Any]:
    """What a session did: requests with their timing, turns, aborts, weight versions."""
    turns, aborts = conn.execute(
        "SELECT count(*), coalesce(sum(num_aborts), 0) FROM nodes WHERE session_id = ? AND kind = 'response'",
        (session_id,),
    ).fetchone()
    low, high = conn.execute(
        "SELECT min(weight_version), max(weight_version) FROM attempts WHERE session_id = ?", (session_id,)
    ).fetchone()
    requests = conn.execute(
        "SELECT request_id, node_id, http_status, error_code, finish_reason, arrived_s, wait_s, latency_s "
        "FROM requests WHERE session_id = ? ORDER BY seq",
        (session_id,),
    )
    return {
        "session_turns": turns,
        "num_aborts": aborts,
        "min_weight_version": low,
        "max_weight_version": high,
        "requests": [dict(request) for request in requests],
    }


def _context(conn: sqlite3.Connection, sample: TrainingSample) -> dict[str, Any]:
    (state_key,) = conn.execute(
        "SELECT state_key FROM nodes WHERE session_id = ? AND node_id = ?", (sample.session_id, sample.node_id)
    ).fetchone()
    return {
        "name": sample.name,
        "node_id": sample.node_id,
        "state_key": state_key,
        "num_turns": sample.num_turns,
        "truncated": sample.truncated,
        "reward": sample.reward,
        "helpers": sample.helpers,
        "credit": sample.credit,
        "response_credits": None if sample.response_credits is None else list(sample.response_credits),
        "metadata": sample.metadata,
        "prompt_len": sample.prompt_len,
        "token_ids": sample.token_ids,
        "loss_mask": sample.loss_mask,
        "logprobs": sample.logprobs,
        "kept_mass": sample.kept_mass,
        "weight_spans": [[span.start, span.length, span.version] for span in sample.version_spans],
        "responses": [[span.node_id, span.start, span.length] for span in sample.responses],
        "images": list(sample.images),
    }


_NO_CONTEXT: dict[str, Any] = {
    "name": None,
    "node_id": None,
    "state_key": None,
    "num_turns": 0,
    "truncated": False,
    "reward": None,
    "helpers": {},
    "credit": None,
    "response_credits": None,
    "metadata": {},
    "prompt_len": 0,
    "token_ids": [],
    "loss_mask": [],
    "logprobs": [],
    "kept_mass": [],
    "weight_spans": [],
    "responses": [],
    "images": [],
}
