"""A session's forest from its stored nodes: what was committed, found by the same requests and records as before."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping
from typing import cast

from silva.forest.identity import chain_key, ids_digest, message_digest
from silva.forest.node import EchoAlias, Node, Repair
from silva.forest.session_forest import SessionForest
from silva.types import (
    MEDIA_PREFIX,
    Conversation,
    FinishReason,
    Image,
    JsonObject,
    Message,
    NodeRow,
    Part,
    ToolCall,
    VersionSpan,
    text_of,
)


def restore_forest(records: Iterable[NodeRow], request_ids: Mapping[int, str] | None = None) -> SessionForest:
    """The forest whose `node_rows` these are, in their order.

    `request_ids` names the requests that committed the responses, by node. Raises ValueError, with the node named,
    where a record cannot have come from a forest.
    """
    forest = SessionForest()
    unnamed: list[Node] = []
    for record in records:
        try:
            node = _node(record, forest)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"node {record.node_id} is damaged: {error}") from error
        forest.add(node)
        if node.parent is None:
            continue
        unnamed.append(node)
        if node.kind == "response":
            # One request commits its observation and the response below it at once.
            for waiting in unnamed:
                waiting.request_id = (request_ids or {}).get(node.node_id)
            unnamed.clear()
    return forest


def _node(record: NodeRow, forest: SessionForest) -> Node:
    parent = None if record.parent_id is None else forest.nodes[record.parent_id]
    if (parent is None) != (record.kind == "root") or record.node_id != len(forest.nodes):
        raise ValueError(f"a {record.kind} under {record.parent_id}, after {len(forest.nodes)} nodes")
    if parent is None:
        conversation = Conversation(tools=tuple(record.tools or ()), template_kwargs=record.template_kwargs or {})
    else:
        conversation = parent.conversation
    if not len(record.token_ids) == len(record.loss_mask) == len(record.logprobs) == len(record.kept_mass):
        raise ValueError("its lists over tokens differ in length")
    node = Node(
        node_id=record.node_id,
        parent=parent,
        key=bytes.fromhex(record.state_key),
        kind=record.kind,
        messages=tuple(message_from_chat(chat) for chat in record.messages),
        conversation=conversation,
        ids=record.token_ids,
    )
    if record.kind == "response":
        _read_answer(node, record, forest)
    return node


def _read_answer(node: Node, record: NodeRow, forest: SessionForest) -> None:
    """What only a response has."""
    assert node.parent is not None
    node.lead = record.loss_mask.count(0)
    node.logprobs = array("f", record.logprobs[node.lead :])
    node.kept_mass = array("f", record.kept_mass[node.lead :])
    node.spans = tuple(
        VersionSpan(start=span.start - node.lead, length=span.length, version=span.version)
        for span in record.version_spans
        if span.start >= node.lead
    )
    node.finish = cast("FinishReason | None", record.finish_reason)
    node.num_aborts = record.num_aborts
    node.before = node.parent.key
    if not node.messages and node.key == chain_key(node.before, ids_digest("response", node.sampled)):
        return  # a turn of ids alone
    (said,) = node.messages
    node.before = _before(node.parent, node.key, message_digest(said))
    node.told = said if record.told is None else message_from_chat(record.told)
    node.spellings = tuple(_spelling(spelling, forest) for spelling in record.spellings)


def _before(parent: Node, key: bytes, digest: bytes) -> bytes:
    """The key of the state that an answer with this key belongs to: its parent's, or where it continues a cut answer,
    that one's.
    """
    if parent.kind == "response" and key == chain_key(parent.before, digest):
        return parent.before
    return parent.key


def _spelling(record: JsonObject, forest: SessionForest) -> EchoAlias:
    node_id: int = record["node_id"]
    return EchoAlias(
        key=bytes.fromhex(record["key"]),
        node=forest.nodes[node_id],
        repair=Repair(kinds=(), renames=record["renames"]),
        beyond=None if record["beyond"] is None else bytes.fromhex(record["beyond"]),
    )


def message_from_chat(chat: JsonObject) -> Message:
    """The message whose `to_chat` this is."""
    content: object = chat["content"]
    parts = _parts(cast("list[JsonObject]", content)) if isinstance(content, list) else ()
    text: str = text_of(parts) if parts else chat["content"] or ""
    return Message(
        role=chat["role"],
        content=text,
        reasoning=chat.get("reasoning_content", ""),
        tool_calls=tuple(_call(call) for call in chat.get("tool_calls", ())),
        tool_call_id=chat.get("tool_call_id"),
        parts=parts,
    )


def _call(call: JsonObject) -> ToolCall:
    return ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])


def _parts(content: Iterable[JsonObject]) -> tuple[Part, ...]:
    return tuple(part["text"] if part["type"] == "text" else _image(part["image_url"]["url"]) for part in content)


def _image(reference: str) -> Image:
    if reference.startswith(MEDIA_PREFIX):
        return Image(digest=reference.removeprefix(MEDIA_PREFIX))
    return Image(digest=hashlib.sha256(reference.encode()).hexdigest(), url=reference)
