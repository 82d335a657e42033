"""One ended session as rows of the run ledger, with the proof that its samples are what its nodes say."""

from __future__ import annotations

import sqlite3
import zlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import chain, compress, repeat

from silva.forest import join_lineage
from silva.store.encode import pack_floats, pack_ids, pack_mask, runs_of, spans_to_json, to_column
from silva.types import (
    AttemptRow,
    NodeRow,
    RequestRow,
    SessionRow,
    TokenUsage,
    TrainingSample,
    VersionSpan,
    check_spans,
    safe_text,
)

_NODE_COLUMNS = (
    *("node_id", "parent_id", "state_key", "kind", "messages", "finish_reason", "num_aborts", "tools"),
    *("template_kwargs", "told"),
)
_REQUEST_COLUMNS = [item.name for item in fields(RequestRow) if item.name != "usage"]
_USAGE = [item.name for item in fields(TokenUsage)]
_ATTEMPT_COLUMNS = [item.name for item in fields(AttemptRow)]
_SAMPLE_COLUMNS = (*("name", "node_id", "prompt_len", "helpers", "response_credits", "truncated", "metadata"),)


def insert_session_rows(conn: sqlite3.Connection, record: SessionRow, ended_s: float) -> None:
    """Write all rows of an ended session, inside the caller's transaction.

    AssertionError if the record contradicts itself.
    """
    for node in record.nodes:
        _check_node(record.session_id, node)
    nodes = {node.node_id: node for node in record.nodes}
    masked = [_masked_runs(sample, nodes) for sample in record.samples]
    changed = conn.execute(
        "UPDATE sessions SET status = ?, reason = ?, error = ?, reward = ?, metadata = ?, output = ?, ended_s = ? "
        "WHERE session_id = ? AND group_id = ? AND mode = ? AND status = 'running'",
        (
            record.status,
            _text(record.reason),
            _text(record.error),
            _real(record.reward),
            to_column(record.metadata),
            None if record.output is None else zlib.compress(record.output),
            ended_s,
            record.session_id,
            record.group_id,
            record.mode,
        ),
    ).rowcount
    assert changed == 1, f"session {record.session_id} of group {record.group_id} is not running as {record.mode}"
    session_id = record.session_id
    usages = (request.usage and to_column(_plain(request.usage, _USAGE)) for request in record.requests)
    scores = ({"reward": _real(sample.reward), "credit": _real(sample.credit)} for sample in record.samples)
    for table, rows in (
        ("nodes", [{"session_id": session_id, **_columns(one, _NODE_COLUMNS), **_packed(one)} for one in record.nodes]),
        ("requests", _numbered(session_id, record.requests, _REQUEST_COLUMNS, ({"usage": usage} for usage in usages))),
        ("attempts", _numbered(session_id, record.attempts, _ATTEMPT_COLUMNS, repeat({}))),
        (
            "samples",
            _numbered(
                session_id,
                record.samples,
                _SAMPLE_COLUMNS,
                ({"masked": to_column(runs), **own} for runs, own in zip(masked, scores, strict=True)),
            ),
        ),
    ):
        if rows:  # one statement per table: to form one per row costs more than to run it
            conn.executemany(
                f"INSERT INTO {table} ({', '.join(rows[0])}) VALUES ({', '.join('?' * len(rows[0]))})",
                [tuple(row.values()) for row in rows],
            )


def _numbered(
    session_id: str, rows: Iterable[object], names: Iterable[str], more: Iterable[Mapping[str, object]]
) -> list[dict[str, object]]:
    """The columns of a session's rows, numbered in their order."""
    return [
        {"session_id": session_id, "seq": seq, **_columns(row, names), **own}
        for seq, (row, own) in enumerate(zip(rows, more, strict=False))
    ]


def lineage(node_id: int, parents: Mapping[int, int | None]) -> list[int]:
    """Node ids from the root to `node_id`."""
    path: list[int] = []
    at: int | None = node_id
    while at is not None:
        assert len(path) <= len(parents), f"the parents of node {node_id} run in a circle"
        path.append(at)
        at = parents[at]
    path.reverse()
    return path


def _text(value: str | None) -> str | None:
    return None if value is None else safe_text(value)


def _real(value: float | None) -> float | None:
    """A reward may be a Python int or bool of any size; the column has floats."""
    return None if value is None else float(value)


def _check_node(session_id: str, node: NodeRow) -> None:
    num_ids = len(node.token_ids)
    lengths = (len(node.loss_mask), len(node.logprobs), len(node.kept_mass))
    where = f"session {session_id}, node {node.node_id}"
    assert lengths == (num_ids, num_ids, num_ids), f"{where}: {num_ids} ids; mask, logprobs, kept mass: {lengths}"
    check_spans(node.version_spans, num_ids)
    unsampled = [not mask for mask in node.loss_mask]
    assert not any(compress(node.logprobs, unsampled)), f"{where}: a logprob on an id whose mask is 0"
    assert set(compress(node.kept_mass, unsampled)) <= {1.0}, f"{where}: a kept mass on an id whose mask is 0"


def _masked_runs(sample: TrainingSample, nodes: Mapping[int, NodeRow]) -> list[list[int]]:
    """Where the sample masks ids that its lineage sampled. AssertionError if it differs from the lineage otherwise."""
    where = f"session {sample.session_id}, sample {sample.name!r}"
    assert sample.node_id in nodes, f"{where}: node {sample.node_id} is not in the record"
    path = [nodes[at] for at in lineage(sample.node_id, {node.node_id: node.parent_id for node in nodes.values()})]
    joined = join_lineage(path)
    assert sample.token_ids == joined.token_ids, f"{where}: its ids are not its lineage's"
    masked = [may != have for may, have in zip(joined.loss_mask, sample.loss_mask, strict=True)]
    assert all(compress(joined.loss_mask, masked)), f"{where}: mask 1 on an id that was not sampled"
    for label, own, other in (
        ("logprobs", sample.logprobs, joined.logprobs),
        ("kept mass", sample.kept_mass, joined.kept_mass),
        ("weight versions", _versions(sample.version_spans), _versions(joined.version_spans)),
    ):
        same = array("f", compress(own, sample.loss_mask)) == array("f", compress(other, sample.loss_mask))
        assert same, f"{where}: its {label} differ from its lineage's"
    return runs_of(masked) if any(masked) else []


def _versions(spans: Iterable[VersionSpan]) -> list[int]:
    return list(chain.from_iterable(repeat(span.version, span.length) for span in spans))


def _packed(node: NodeRow) -> dict[str, object]:
    """The columns of a node that hold arrays, and its spellings, which most nodes lack."""
    return {
        "token_ids": pack_ids(node.token_ids),
        "loss_mask": pack_mask(node.loss_mask),
        "logprobs": pack_floats(compress(node.logprobs, node.loss_mask)),
        "kept_mass": pack_floats(compress(node.kept_mass, node.loss_mask)),
        "version_spans": spans_to_json(node.version_spans),
        "spellings": to_column(node.spellings) if node.spellings else None,
    }


def _columns(row: object, names: Iterable[str]) -> dict[str, object]:
    return {name: _column(value) for name, value in _plain(row, names).items()}


def _plain(row: object, names: Iterable[str]) -> dict[str, object]:
    return {name: getattr(row, name) for name in names}


def _column(value: object) -> object:
    """A field as SQLite takes it: text that is valid, lists and objects as JSON."""
    kind = type(value)
    if kind is str:
        return safe_text(str(value))
    return to_column(value) if kind in (list, tuple, dict) else value
