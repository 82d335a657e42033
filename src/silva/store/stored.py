"""Ended sessions as the ledger keeps them: what an export or a reward function looks at, read back."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from silva.store.encode import unpack_array
from silva.types.generation import VersionSpan
from silva.types.rollout import NodeRow, RequestRow, SessionInput

_REQUEST_COLUMNS = (
    "request_id, protocol, stream, arrived_s, match, node_id, http_status, error_code, finish_reason, wait_s, latency_s"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSession:
    """One session. `output` is what its agent wrote, None where it wrote nothing (or did not end well).

    `requests` are in order of arrival, without their repairs, differences, usage and ignored fields.
    """

    nodes: list[NodeRow]
    requests: list[RequestRow]
    output: bytes | None
    input: SessionInput | None
    label: Any

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
    content: dict[str, Any] = json.loads(row["input"])
    messages, metadata = content.get("messages"), content.get("metadata")
    nothing = messages is None and metadata is None
    return StoredSession(
        nodes=list(_nodes(conn, session_id)),
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


def _nodes(conn: sqlite3.Connection, session_id: str) -> Iterator[NodeRow]:
    for row in conn.execute("SELECT * FROM nodes WHERE session_id = ? ORDER BY node_id", (session_id,)):
        try:
            yield _node(row)
        except (ValueError, TypeError) as error:
            raise ValueError(f"node {row['node_id']} is damaged: {error}") from error


def _node(row: sqlite3.Row) -> NodeRow:
    mask = list(row["loss_mask"])
    lead = mask.count(0)
    return NodeRow(
        node_id=row["node_id"],
        parent_id=row["parent_id"],
        state_key=row["state_key"],
        kind=row["kind"],
        messages=json.loads(row["messages"]),
        token_ids=unpack_array("i", row["token_ids"]).tolist(),
        loss_mask=mask,
        logprobs=[0.0] * lead + unpack_array("f", row["logprobs"]).tolist(),
        kept_mass=[1.0] * lead + unpack_array("f", row["kept_mass"]).tolist(),
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


def _parsed(text: str | None) -> Any:
    return None if text is None else json.loads(text)
