"""The text of `silva explain`: which requests left a session's known history, where, and by what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from silva.forest import PROFILES, REPAIR_PREFIX, linear_under
from silva.store import NodeDoc, RequestDoc, SessionDoc
from silva.view.show import above, block, printable, value_text

_KINDS = {"branch": "branched off", "root": "began anew"}
_REPAIRS = {
    "blanks": "outer blanks of a text were lost",
    "reasoning_missing": "the reasoning was left out",
    "call_ids": "calls had ids of the client's own",
    "answer_missing": "an empty answer was left out",
    "ambiguous": "several answers fitted, the newest was taken",
}


def render_explanation(doc: SessionDoc) -> str:
    """One block a request that left the known history, then what was repaired in others."""
    requests = doc["requests"]
    reason = f" ({printable(doc['reason'])})" if doc["reason"] else ""
    lines = [f"session {printable(doc['session_id'])}  {doc['status']}{reason}  {len(requests)} requests"]
    if doc["error"]:
        lines += ["error", *block(doc["error"], full=True)]
    if doc["status"] == "running":
        lines.append("still running: requests are written when the session ends")
    nodes = {node["node_id"]: node for node in doc["nodes"]}
    num_roots = sum(_is_root(node, nodes) for node in doc["nodes"])
    if num_roots > 1:
        lines.append(f"the history has {num_roots} roots")
    left = [request for request in requests if request["difference"]]
    for request in left:
        lines += ["", *_difference(request, nodes)]
    if requests and not left:
        lines.append("no request left the known history" + _again(requests))
    repairs = Counter(repair for request in requests for repair in request["repairs"])
    if repairs:
        lines += ["", "what was repaired, or ignored"]
        lines += [f"  {number} x {printable(kind)}: {_repair(kind)}".rstrip(": ") for kind, number in repairs.items()]
    return "\n".join(lines) + "\n"


def _repair(kind: str) -> str:
    profile = PROFILES.get(kind.removeprefix(REPAIR_PREFIX)) if kind.startswith(REPAIR_PREFIX) else None
    return _REPAIRS.get(kind, "") if profile is None else f"{profile.about} (the model reads what came first)"


def _is_root(node: NodeDoc, nodes: dict[int, NodeDoc]) -> bool:
    """Whether a conversation begins with this node: its parent is a technical root."""
    parent = nodes.get(above(node))
    return parent is not None and parent["kind"] == "root"


def _again(requests: list[RequestDoc]) -> str:
    again = sum(request["match"] == "branch" for request in requests)
    return f" ({again} asked again from a known state)" if again else ""


def _difference(request: RequestDoc, nodes: dict[int, NodeDoc]) -> Iterator[str]:
    difference = request["difference"] or {}
    what = _KINDS.get(request["match"] or "", "left the known history")
    yield f"request {printable(request['request_id'])} {what}{_from_node(request, nodes)}"
    yield f"  first difference at {printable(str(difference.get('pointer')))}"
    yield f"    known  {value_text(difference.get('old'))}"
    yield f"    sent   {value_text(difference.get('new'))}"
    yield from _hint(request, nodes)


def _hint(request: RequestDoc, nodes: dict[int, NodeDoc]) -> Iterator[str]:
    """The profile that would have taken the new system text for an earlier one."""
    mine = _first_observation(request["node_id"], nodes)
    new = None if mine is None else _system_text(mine)
    if mine is None or new is None:
        return
    for node in nodes.values():
        old = _system_text(node) if _is_root(node, nodes) and node["node_id"] < mine["node_id"] else None
        profile = None if old is None or old == new else linear_under(old, new)
        if profile is not None and REPAIR_PREFIX + profile.name not in request["repairs"]:
            yield f"  noise of a known kind: {profile.about}"
            setting = f", or {profile.setting}" if profile.setting else ""
            yield f"  with --agentic-profiles {profile.name} it would be the same text{setting}"
            return


def _first_observation(node_id: int | None, nodes: dict[int, NodeDoc]) -> NodeDoc | None:
    """The root of the conversation that a node belongs to."""
    while (node := nodes.get(-1 if node_id is None else node_id)) is not None:
        if _is_root(node, nodes):
            return node
        node_id = node["parent_id"]
    return None


def _system_text(node: NodeDoc) -> str | None:
    first = node["messages"][0] if node["messages"] else {}
    return str(first["content"]) if first.get("role") == "system" else None


def _from_node(request: RequestDoc, nodes: dict[int, NodeDoc]) -> str:
    """The state that it still matched: above the observation that the request brought."""
    node_id = request["node_id"]
    if node_id is None:
        return ", its turn was not committed"
    if request["match"] == "root":
        return f", its answer is node {node_id}"
    observation = nodes.get(above(nodes[node_id])) if node_id in nodes else None
    matched = None if observation is None else observation["parent_id"]
    return f" at node {node_id}" if matched is None else f" from node {matched} (its answer is node {node_id})"
