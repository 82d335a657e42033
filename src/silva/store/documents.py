"""The documents of `silva show --json` and `silva explain`: their types, and how they are read from the ledger."""

from __future__ import annotations

import difflib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict, TypeVar, cast

from silva.store.files import LedgerError
from silva.store.queries import Counts, counts, load_contexts, open_run
from silva.store.stored import read_nodes
from silva.types import JsonObject, NodeRow, TrainingSample, safe_text

D = TypeVar("D")


class GroupDoc(TypedDict):
    """One try at a prompt."""

    group_id: str
    prompt_id: str
    mode: str
    n: int
    """Slots."""
    start_step: int
    train_step: int | None
    """None until the group was trained or given up."""
    attempt: int


class SessionLineDoc(TypedDict):
    """A session in the list of a run."""

    session_id: str
    group_id: str
    mode: str
    status: str
    reason: str | None
    reward: float | None


class FailureDoc(TypedDict):
    """The first failed session of a reason."""

    reason: str | None
    session_id: str
    error: str | None


class RunDoc(TypedDict):
    """`silva show RUN --json`."""

    run: str
    counts: Counts
    groups: list[GroupDoc]
    sessions: list[SessionLineDoc]
    failures: list[FailureDoc]


class NodeDoc(TypedDict):
    """One state of the session: what it adds, token by token."""

    node_id: int
    parent_id: int | None
    state_key: str
    kind: str
    messages: list[JsonObject]
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    weight_spans: list[list[int]]
    """[start, length, weight version] over the ids; version -1 was not sampled."""
    finish_reason: str | None
    num_aborts: int


class ContextDoc(TypedDict):
    """One exported context, without its tokens."""

    name: str | None
    node_id: int
    num_turns: int
    prompt_len: int
    num_tokens: int
    num_trainable: int
    responses: list[list[int]]
    """[node, start, length] of each turn's sampled ids."""
    reward: float | None
    helpers: dict[str, float]
    credit: float | None
    response_credits: list[float] | None
    """One per turn; None where all have `credit`."""
    metadata: JsonObject


class SampleDoc(TypedDict):
    """A context that has tokens to train, with these."""

    name: str | None
    node_id: int
    prompt_len: int
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    reward: float | None
    credit: float | None
    metadata: JsonObject


class RequestDoc(TypedDict):
    """One model request. Times are seconds since the session started."""

    request_id: str
    protocol: str
    stream: bool
    match: str | None
    repairs: list[str]
    difference: JsonObject | None
    """The first field in which the request left the known history: pointer, old, new."""
    node_id: int | None
    http_status: int | None
    error_code: str | None
    finish_reason: str | None
    usage: dict[str, int] | None
    arrived_s: float
    wait_s: float
    latency_s: float | None


class SessionDoc(SessionLineDoc):
    """`silva show RUN SESSION --json`."""

    error: str | None
    metadata: JsonObject
    nodes: list[NodeDoc]
    contexts: list[ContextDoc]
    """All that were exported."""
    samples: list[SampleDoc]
    """Those of them that have tokens to train."""
    requests: list[RequestDoc]
    ignored_fields: dict[str, int]
    """In how many requests each name occurred that means nothing here."""


def show_run(run_dir: str | Path) -> RunDoc:
    """`{"run", "counts", "groups": [...], "sessions": [...], "failures": [...]}`, as `silva show RUN --json` prints it.

    `failures` are the first failed session of each reason, with its error.
    """
    with open_run(run_dir) as conn:
        return {
            "run": safe_text(str(run_dir)),
            "counts": counts(conn),
            "groups": _listed(conn, GroupDoc, "groups ORDER BY rowid"),
            "sessions": _listed(conn, SessionLineDoc, "sessions ORDER BY rowid"),
            "failures": _listed(
                conn,
                FailureDoc,
                "sessions WHERE rowid IN "
                "(SELECT min(rowid) FROM sessions WHERE status = 'failed' GROUP BY reason) ORDER BY rowid",
            ),
        }


def _listed(conn: sqlite3.Connection, document: type[D], source: str) -> list[D]:
    """A document for each row of a table (and what follows its name), whose columns are named like the fields."""
    rows = conn.execute(f"SELECT {', '.join(document.__annotations__)} FROM {source}")
    return [cast("D", dict(row)) for row in rows]


def show_session(run_dir: str | Path, session_id: str) -> SessionDoc:
    """One session with its nodes, contexts, samples and requests. A live one is `running`, its lists are empty.

    `contexts` are all that were exported, `samples` those of them that have tokens to train.

    LedgerError, naming close ids, if there is no such session.
    """
    with open_run(run_dir) as conn:
        row = conn.execute(
            "SELECT session_id, group_id, mode, status, reason, error, reward, metadata FROM sessions "
            "WHERE session_id = ?",
            (safe_text(session_id),),
        ).fetchone()
        if row is None:
            raise _no_session(conn, run_dir, session_id)
        nodes = list(read_nodes(conn, safe_text(session_id), shortest=True))
        contexts = [context.sample for context in load_contexts(conn, session_id, nodes)]
        session = {
            **dict(row),
            "metadata": json.loads(row["metadata"]),
            "nodes": [_node_doc(node) for node in nodes],
            "contexts": [_context_doc(sample) for sample in contexts],
            "samples": [cast("SampleDoc", _picked(sample, SampleDoc)) for sample in contexts if sample.num_trainable],
            "requests": [_request_doc(request) for request in _requests(conn, session_id)],
            "ignored_fields": _ignored_fields(conn, session_id),
        }
        return cast("SessionDoc", session)


def _picked(source: object, document: type, **facts: object) -> dict[str, object]:
    """The fields of a document, in its order: `facts`, else the attributes of the same names."""
    return {name: facts[name] if name in facts else getattr(source, name) for name in document.__annotations__}


def _node_doc(node: NodeRow) -> NodeDoc:
    spans = [[span.start, span.length, span.version] for span in node.version_spans]
    return cast("NodeDoc", _picked(node, NodeDoc, weight_spans=spans))


def _requests(conn: sqlite3.Connection, session_id: str) -> Iterator[sqlite3.Row]:
    return conn.execute("SELECT * FROM requests WHERE session_id = ? ORDER BY seq", (safe_text(session_id),))


def _context_doc(sample: TrainingSample) -> ContextDoc:
    responses = [[span.node_id, span.start, span.length] for span in sample.responses]
    credits = None if sample.response_credits is None else list(sample.response_credits)
    facts = {"num_tokens": len(sample.token_ids), "responses": responses, "response_credits": credits}
    return cast("ContextDoc", _picked(sample, ContextDoc, **facts))


def _request_doc(row: sqlite3.Row) -> RequestDoc:
    read = {name: row[name] and json.loads(row[name]) for name in ("repairs", "difference", "usage")}
    return cast(
        "RequestDoc",
        {**{name: row[name] for name in RequestDoc.__annotations__}, "stream": bool(row["stream"]), **read},
    )


def _ignored_fields(conn: sqlite3.Connection, session_id: str) -> dict[str, int]:
    """In how many requests of a session each name occurred that means nothing here."""
    counts = Counter(name for row in _requests(conn, session_id) for name in json.loads(row["ignored_fields"]))
    return dict(sorted(counts.items()))


def _no_session(conn: sqlite3.Connection, run_dir: str | Path, session_id: str) -> LedgerError:
    known = [row[0] for row in conn.execute("SELECT session_id FROM sessions ORDER BY rowid DESC LIMIT 20000")]
    close = [name for name in known if session_id and name.startswith(session_id)][:3]
    close = close or difflib.get_close_matches(session_id, known[:2000], n=3, cutoff=0.5)
    if close:
        hint = "did you mean " + " or ".join(close) + "?"
    elif known:
        hint = f"silva show {run_dir} lists its sessions"
    else:
        hint = "it has no sessions yet"
    return LedgerError(f"the run in {run_dir} has no session {session_id!r}; {hint}")
