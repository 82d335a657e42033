"""Ended sessions read back from the ledger, for re-export and reward functions."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from silva.store.encode import unpack_exact, unpack_floats, unpack_ids
from silva.types import JsonObject, NodeRow, RequestRow, SessionInput, VersionSpan

_REQUEST_COLUMNS = (
    "request_id, protocol, stream, arrived_s, match, node_id, http_status, error_code, finish_reason, wait_s, latency_s"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSession:
    """One session."""

    nodes: list[NodeRow]
    requests: list[RequestRow]
    """In order of arrival, without repairs, differences, usage and ignored fields."""
    output: bytes | None
    """What its agent wrote; None where it wrote nothing, or did not end well."""
    input: SessionInput | None
    """What its agent was given; None for a session that a client opened."""
    label: object
    """The row's value under --label-key, any JSON value."""

    def request_ids(self) -> dict[int, str]:
        """By node, the request that committed it."""
        return {
            request.node_id: request.request_id
            for request in self.requests
            if request.node_id is not None and request.match != "join"
        }


def load_session(conn: sqlite3.Connection, session_id: str) -> StoredSession:
    """An ended session. ValueError where its rows cannot be read."""
    row = conn.execute(
        "SELECT s.output, p.input FROM sessions s JOIN groups g USING (group_id) JOIN prompts p USING (prompt_id) "
        "WHERE session_id = ?",
        (session_id,),
    ).fetchone()
    content: JsonObject = json.loads(row["input"])
    messages, metadata = content.get("messages"), content.get("metadata")
    nothing = messages is None and metadata is None
    return StoredSession(
        nodes=list(read_nodes(conn, session_id)),
        requests=[
            RequestRow(**{**dict(request), "stream": bool(request["stream"])})
            for request in conn.execute(
                f"SELECT {_REQUEST_COLUMNS} FROM requests WHERE session_id = ? ORDER BY seq", (session_id,)
            )
        ],
        output=None if row["output"] is None else unpack_output(row["output"]),
        input=None if nothing else SessionInput(messages=messages, metadata=metadata),
        label=content.get("label"),
    )


def unpack_output(packed: bytes) -> bytes:
    """What an agent wrote. ValueError where the column is damaged."""
    try:
        return zlib.decompress(packed)
    except zlib.error as error:
        raise ValueError(f"the output of the agent is damaged: {error}") from error


def read_nodes(conn: sqlite3.Connection, session_id: str, *, shortest: bool = False) -> Iterator[NodeRow]:
    """The nodes of a session, in order. ValueError where one cannot be read.

    `shortest`: log-probs and kept mass as the shortest decimals that stand for their float32 values, for documents.
    """
    floats = unpack_floats if shortest else unpack_exact
    for row in conn.execute("SELECT * FROM nodes WHERE session_id = ? ORDER BY node_id", (session_id,)):
        try:
            mask = list(row["loss_mask"])
            yield NodeRow(
                node_id=row["node_id"],
                parent_id=row["parent_id"],
                state_key=row["state_key"],
                kind=row["kind"],
                messages=json.loads(row["messages"]),
                token_ids=unpack_ids(row["token_ids"]),
                loss_mask=mask,
                logprobs=_spread(floats(row["logprobs"]), mask, 0.0),
                kept_mass=_spread(floats(row["kept_mass"]), mask, 1.0),
                version_spans=tuple(
                    VersionSpan(start=start, length=length, version=version)
                    for start, length, version in json.loads(row["version_spans"])
                ),
                finish_reason=row["finish_reason"],
                num_aborts=row["num_aborts"],
                tools=_parsed(row["tools"]),
                template_kwargs=_parsed(row["template_kwargs"]),
                told=_parsed(row["told"]),
                spellings=_parsed(row["spellings"]) or [],
            )
        except (ValueError, TypeError, StopIteration) as error:
            raise ValueError(f"node {row['node_id']} is damaged: {error}") from error


def _spread(values: list[float], mask: list[int], elsewhere: float) -> list[float]:
    """One value per id, from one per sampled id. ValueError where there are more or fewer than those."""
    if len(values) != sum(mask):
        raise ValueError(f"{len(values)} values for {sum(mask)} sampled ids")
    following = iter(values)
    return [next(following) if flag else elsewhere for flag in mask]


def _parsed(text: str | None) -> Any:
    return None if text is None else json.loads(text)
