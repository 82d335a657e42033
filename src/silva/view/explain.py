"""The text of `silva explain`: which requests left a session's known history, where, and by what."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from silva.view.show import Doc, printable

_KINDS = {"branch": "branched off", "root": "began anew"}
_REPAIRS = {
    "blanks": "outer blanks of a text were lost",
    "reasoning_missing": "the reasoning was left out",
    "call_ids": "calls had ids of the client's own",
    "ambiguous": "several answers fitted, the newest was taken",
}


def render_explanation(doc: Doc) -> str:
    """One block a request that left the known history, then what was repaired in others."""
    requests = doc["requests"]
    lines = [f"session {printable(doc['session_id'])}  {doc['status']}  {len(requests)} requests"]
    if doc["status"] == "running":
        lines.append("still running: requests are written when the session ends")
    parents = {node["node_id"]: node["parent_id"] for node in doc["nodes"]}
    left = [request for request in requests if request["difference"]]
    for request in left:
        lines += ["", *_difference(request, parents)]
    if requests and not left:
        lines.append("no request left the known history" + _again(requests))
    repairs = Counter(repair for request in requests for repair in request["repairs"])
    if repairs:
        lines += ["", "echoes of the assistant that were repaired"]
        lines += [
            f"  {number} x {printable(kind)}: {_REPAIRS.get(kind, '')}".rstrip(": ") for kind, number in repairs.items()
        ]
    return "\n".join(lines) + "\n"


def _again(requests: list[Doc]) -> str:
    again = sum(request["match"] == "branch" for request in requests)
    return f" ({again} asked again from a known state)" if again else ""


def _difference(request: Doc, parents: dict[int, int | None]) -> Iterator[str]:
    difference = request["difference"]
    what = _KINDS.get(request["match"], "left the known history")
    yield f"request {printable(request['request_id'])} {what}{_from_node(request, parents)}"
    yield f"  first difference at {printable(str(difference.get('pointer')))}"
    yield f"    known  {_value(difference.get('old'))}"
    yield f"    sent   {_value(difference.get('new'))}"


def _from_node(request: Doc, parents: dict[int, int | None]) -> str:
    """The state that it still matched: above the observation that the request brought."""
    node_id = request["node_id"]
    if node_id is None:
        return ", its turn was not committed"
    if request["match"] == "root":
        return f", its answer is node {node_id}"
    observation = parents.get(node_id)
    matched = None if observation is None else parents.get(observation)
    return f" at node {node_id}" if matched is None else f" from node {matched} (its answer is node {node_id})"


def _value(value: Any) -> str:
    return "(absent)" if value is None else printable(json.dumps(value, ensure_ascii=False))
