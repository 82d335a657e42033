"""Reads the run ledger. Connections are read-only and work beside a live writer as well as on a finished run."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, cast

from silva.forest import join_lineage
from silva.store.files import DB_NAME, LedgerError, schema_version, unreadable
from silva.store.rows import lineage
from silva.store.stored import read_nodes
from silva.types import JsonObject, Mode, NodeRow, TrainingSample, part_of, safe_text


class LedgerCounts(TypedDict):
    """How many prompts and sessions are in each state, by reason; NO_REASON where a state needs none."""

    prompts: dict[str, dict[str, int]]
    sessions: dict[str, dict[str, int]]


class Counts(LedgerCounts):
    """Counts of what is for training, with those of eval beside them."""

    eval: LedgerCounts


class StepAccount(TypedDict):
    """What became of the groups of one step."""

    prompts: int
    trained: int
    delivered: int
    filtered: int
    dropped: int
    stale: int
    pending: int
    sessions: int
    exported: int
    failed: int
    cancelled: int
    running: int
    failures: dict[str, int]
    """Failed sessions by reason."""
    turns: int
    """Responses committed."""
    tokens: int
    """Ids sampled."""
    aborts: int
    rewarded: int
    """Sessions with a reward."""
    reward: float | None
    """Mean over these."""


NO_REASON = "none"
"""The reason under which counts list a state that needs none, such as `trained`."""


@contextmanager
def open_run(run_dir: str | Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection to a run's ledger that sees one moment of it.

    LedgerError if there is no ledger or it is damaged.
    """
    path = Path(run_dir) / DB_NAME
    if not path.is_file():
        what = "holds no run" if Path(run_dir).is_dir() else "is not a directory"
        raise LedgerError(f"{run_dir} {what}: there is no {path}")
    conn: sqlite3.Connection | None = None
    try:
        conn = _connect(path)
        yield conn
    except (sqlite3.DatabaseError, json.JSONDecodeError) as error:
        raise unreadable(path, error) from error
    finally:
        if conn is not None:
            conn.close()


def _connect(path: Path) -> sqlite3.Connection:
    uri = path.absolute().as_uri() + "?mode=ro"
    try:
        return _begin(uri, path)
    except sqlite3.OperationalError:
        # A directory that we may not write has no place for the index of the log; without a log none is needed.
        if path.with_name(DB_NAME + "-wal").exists():
            raise
        return _begin(uri + "&immutable=1", path)


def _begin(uri: str, path: Path) -> sqlite3.Connection:
    conn = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=10.0)
    try:
        conn.row_factory = sqlite3.Row
        conn.execute("BEGIN")
        if schema_version(conn, path) is None:
            raise LedgerError(f"{path} is an empty ledger: that run is starting just now, or stopped while it started")
    except BaseException:
        conn.close()
        raise
    return conn


def counts(conn: sqlite3.Connection) -> Counts:
    """`{"prompts": {state: {reason: n}}, "sessions": {status: {reason: n}}, "eval": {the same two}}`.

    The outer two count what is for training. States without a reason are counted under "none".
    """
    return {**_counts(conn, "train"), "eval": _counts(conn, "eval")}


def pending_places(conn: sqlite3.Connection) -> list[tuple[int, int, int]]:
    """(position, epoch, row) of each train prompt that has no end yet."""
    query = "SELECT position, epoch, row FROM prompts WHERE mode = 'train' AND state = 'pending' ORDER BY position"
    return conn.execute(query).fetchall()


def _counts(conn: sqlite3.Connection, mode: Mode) -> LedgerCounts:
    doc: dict[str, dict[str, dict[str, int]]] = {}
    for table, column in (("prompts", "state"), ("sessions", "status")):
        doc[table] = {}
        query = (
            f"SELECT {column}, coalesce(reason, ?), count(*) FROM {table} WHERE mode = ? GROUP BY 1, 2 ORDER BY 1, 2"
        )
        for state, reason, number in conn.execute(query, (NO_REASON, mode)):
            doc[table].setdefault(state, {})[reason] = number
    return {"prompts": doc["prompts"], "sessions": doc["sessions"]}


def check_ledgers(conn: sqlite3.Connection, *, finished: bool = False) -> None:
    """AssertionError, with everything found, unless the ledgers add up.

    The schema itself ensures that each prompt and session is in exactly one state, with a reason where one is needed.
    Here: all rows belong together, each slot of a group yields at most one session, an exported session has samples and
    no other has, retries follow a failed or cancelled session of their slot, and a consumed prompt has an exported
    session. With `finished`, nothing runs any more.
    """
    checks = [*_CHECKS, *(_FINISHED_CHECKS if finished else ())]
    found: list[str] = [
        f"{what}: {', '.join(str(tuple(row)) for row in rows)}"
        for what, query in checks
        if (rows := conn.execute(f"{query} LIMIT 5").fetchall())
    ]
    found += [f"a row of {row[0]} names a missing row of {row[2]}" for row in conn.execute("PRAGMA foreign_key_check")]
    if found:
        raise AssertionError("the ledgers do not add up:\n" + "\n".join(found))


_CHECKS = (
    (
        "group and prompt are of different modes",
        "SELECT g.group_id FROM groups g JOIN prompts p USING (prompt_id) WHERE g.mode <> p.mode",
    ),
    (
        "session and group are of different modes, or the slot is none of the group's",
        "SELECT session_id FROM sessions s JOIN groups g USING (group_id) WHERE s.mode <> g.mode OR s.slot >= g.n",
    ),
    (
        "exported without samples",
        "SELECT session_id FROM sessions WHERE status = 'exported' "
        "AND session_id NOT IN (SELECT session_id FROM samples)",
    ),
    (
        "samples of a session that is not exported",
        "SELECT DISTINCT session_id FROM samples JOIN sessions USING (session_id) WHERE status <> 'exported'",
    ),
    (
        "more than one session of a slot runs or was exported",
        "SELECT group_id, slot, count(*) FROM sessions WHERE status IN ('running', 'exported') "
        "GROUP BY group_id, slot HAVING count(*) > 1",
    ),
    (
        "a retry without the try before it, or after one that succeeded",
        "SELECT s.session_id FROM sessions s WHERE s.try_index > 0 AND NOT EXISTS (SELECT 1 FROM sessions t "
        "WHERE t.group_id = s.group_id AND t.slot = s.slot AND t.try_index = s.try_index - 1 "
        "AND t.status IN ('failed', 'cancelled'))",
    ),
    (
        "trained or delivered without an exported session",
        "SELECT prompt_id FROM prompts WHERE state IN ('trained', 'delivered') AND prompt_id NOT IN "
        "(SELECT prompt_id FROM groups JOIN sessions USING (group_id) WHERE status = 'exported')",
    ),
    (
        "a request names a node that its session lacks",
        "SELECT session_id, request_id FROM requests r WHERE node_id IS NOT NULL AND NOT EXISTS "
        "(SELECT 1 FROM nodes n WHERE n.session_id = r.session_id AND n.node_id = r.node_id)",
    ),
    (
        "two prompts with one position",
        "SELECT position, count(*) FROM prompts WHERE mode = 'train' GROUP BY position HAVING count(*) > 1",
    ),
)

_FINISHED_CHECKS = (("still running", "SELECT session_id FROM sessions WHERE status = 'running'"),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """An exported context with what its tokens do not say: messages in Chat form, tools and template arguments."""

    sample: TrainingSample
    """Its tokens."""
    state_key: str
    """Key of the state that the context ends in, in hex."""
    messages: list[JsonObject]
    """The conversation in Chat form."""
    tools: list[JsonObject]
    """In OpenAI form."""
    template_kwargs: JsonObject
    """Arguments of the chat template."""


def load_samples(conn: sqlite3.Connection, session_id: str) -> list[TrainingSample]:
    """The contexts of an exported session, their token lists joined from the nodes of their lineage."""
    return [context.sample for context in load_contexts(conn, session_id)]


def load_contexts(conn: sqlite3.Connection, session_id: str, nodes: Sequence[NodeRow] | None = None) -> list[Context]:
    """The same contexts with their conversations. `nodes`: those of the session, where they were read already."""
    rows = conn.execute(
        "SELECT m.*, s.group_id FROM samples m JOIN sessions s USING (session_id) WHERE session_id = ? ORDER BY seq",
        (safe_text(session_id),),
    ).fetchall()
    nodes = list(read_nodes(conn, safe_text(session_id), shortest=True)) if rows and nodes is None else nodes or []
    by_id = {node.node_id: node for node in nodes}
    return [_context(row, by_id) for row in rows]


def _context(row: sqlite3.Row, nodes: dict[int, NodeRow]) -> Context:
    path = [nodes[node_id] for node_id in lineage(row["node_id"], {at: node.parent_id for at, node in nodes.items()})]
    joined = join_lineage(path)
    joined.mask_out(json.loads(row["masked"]))
    sample = part_of(
        joined,
        TrainingSample,
        **{name: row[name] for name in ("session_id", "group_id", "name", "node_id", "prompt_len", "reward", "credit")},
        helpers=json.loads(row["helpers"]),
        response_credits=None if row["response_credits"] is None else tuple(json.loads(row["response_credits"])),
        truncated=bool(row["truncated"]),
        metadata=json.loads(row["metadata"]),
        images=tuple(url for node in path for message in node.messages for url in _image_urls(message)),
    )
    return Context(
        sample=sample,
        state_key=path[-1].state_key,
        messages=[message for node in path for message in node.messages],
        tools=path[0].tools or [],
        template_kwargs=path[0].template_kwargs or {},
    )


def _image_urls(message: JsonObject) -> Iterator[str]:
    content = message["content"]
    for part in content if isinstance(content, list) else ():
        if part["type"] == "image_url":
            yield part["image_url"]["url"]


def accounting(conn: sqlite3.Connection, rollout_id: int, *, mode: Mode = "train") -> StepAccount:
    """What became of the groups of one rollout step."""
    here = "groups WHERE step = ? AND mode = ?"
    at = (rollout_id, mode)
    prompts = dict(
        conn.execute(
            f"SELECT state, count(*) FROM prompts WHERE prompt_id IN (SELECT prompt_id FROM {here}) GROUP BY 1", at
        ).fetchall()
    )
    sessions = f"sessions WHERE group_id IN (SELECT group_id FROM {here})"
    statuses = dict(conn.execute(f"SELECT status, count(*) FROM {sessions} GROUP BY 1", at).fetchall())
    failures = dict(
        conn.execute(
            f"SELECT reason, count(*) FROM {sessions} AND status = 'failed' GROUP BY 1 ORDER BY 1", at
        ).fetchall()
    )
    rewarded, reward = conn.execute(f"SELECT count(reward), avg(reward) FROM {sessions}", at).fetchone()
    turns, num_bytes, aborts = conn.execute(
        "SELECT count(*), coalesce(sum(length(logprobs)), 0), coalesce(sum(num_aborts), 0) FROM nodes "
        f"WHERE kind = 'response' AND session_id IN (SELECT session_id FROM {sessions})",
        at,
    ).fetchone()
    states = ("trained", "delivered", "filtered", "dropped", "stale", "pending")
    found = {
        "prompts": sum(prompts.values()),
        **{state: prompts.get(state, 0) for state in states},
        "sessions": sum(statuses.values()),
        **{status: statuses.get(status, 0) for status in ("exported", "failed", "cancelled", "running")},
        "failures": failures,
        "turns": turns,
        "tokens": num_bytes // 4,
        "aborts": aborts,
        "rewarded": rewarded,
        "reward": reward,
    }
    return cast("StepAccount", found)


def roots_per_session(conn: sqlite3.Connection, rollout_id: int, *, mode: Mode = "train") -> list[int]:
    """How many conversations each ended session of a rollout step began; sessions without a turn are left out."""
    rows = conn.execute(
        "SELECT count(*) FROM nodes n JOIN nodes above ON above.session_id = n.session_id "
        "AND above.node_id = n.parent_id AND above.kind = 'root' "
        "WHERE n.session_id IN (SELECT session_id FROM sessions "
        "WHERE group_id IN (SELECT group_id FROM groups WHERE step = ? AND mode = ?)) GROUP BY n.session_id",
        (rollout_id, mode),
    )
    return [number for (number,) in rows]


def accounting_line(rollout_id: int, account: StepAccount) -> str:
    """The log line of a finished rollout step: `AGENTIC ROLLOUT event=accounting_end rollout=N key=value ...`."""
    fields = [f"{key}={_word(value)}" for key, value in account.items()]
    return " ".join([f"AGENTIC ROLLOUT event=accounting_end rollout={rollout_id}", *fields])


def _word(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{_word(key)}:{number}" for key, number in value.items()) or NO_REASON
    if isinstance(value, float):
        return f"{value:.6g}"
    text = NO_REASON if value is None else str(value)
    return "".join(char if char.isprintable() and char not in " =,:" else "_" for char in text)
