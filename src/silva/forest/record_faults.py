"""Why a record of explicit export leads to no committed state, in words for the one who wrote the agent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from silva.forest.difference import Found, conversation_difference, message_differences, shown_values
from silva.forest.echo import MessageAt
from silva.forest.identity import root_key
from silva.forest.node import Node
from silva.forest.records import Search, ToldHistories
from silva.types import Conversation, JsonObject, Message

_MAX_COMPARED = 64
_MAX_ROOTS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordHistory:
    """A record's history: one digest a message, the messages where they are asked for, its tools and arguments."""

    conversation: Conversation
    """Its tools and template arguments."""
    digests: Sequence[bytes]
    """One per message."""
    message_at: MessageAt
    """Forms a message where it is asked for."""


def why_unmatched(told: ToldHistories, history: RecordHistory, search: Search, *, lenient: bool) -> str:
    """What is wrong with a record for which `search` found no candidate: where, what was, what came, what to do."""
    if not told.roots:
        return "the session has no history of messages: its turns were given as token ids"
    root = root_key(history.conversation)
    other, reached = root, search
    for key in [key for key in list(told.roots)[-_MAX_ROOTS:] if key != root][::-1]:
        there = told.find(key, history.digests, history.message_at, lenient=lenient)
        if root in told.roots and not there.candidates:
            continue
        if other == root or _rank(there) > _rank(reached):
            other, reached = key, there
    if other != root:
        return _other_conversation(told.roots[other], history)
    if search.depth == len(history.digests):
        return _no_state(told, search)
    return _left(told, history, search, lenient)


def _rank(search: Search) -> tuple[bool, int]:
    return bool(search.candidates), search.depth


def _other_conversation(old: Conversation, history: RecordHistory) -> str:
    found = conversation_difference(old, history.conversation)
    assert found is not None
    name = found[0].split("/")[1]
    remedy = f"copy the `{name}` of the requests into the record, exactly as they were sent"
    if (name == "tools" and not old.tools) or (name != "tools" and not old.template_kwargs):
        remedy = f"the requests had no {name}: leave them out of the record"
    return f"{_differs(found)}. What a record needs are the tools and chat_template_kwargs of its requests: {remedy}"


def _no_state(told: ToldHistories, search: Search) -> str:
    """Every message was read, and there is nothing that could be trained at its end."""
    key = search.places[-1]
    last = search.depth - 1
    inside = told.inside(key)
    states = told.states(key)
    if states or inside is None:
        return (
            f"it ends with messages[{last}], before any answer of the model ({_name(states)}). A context holds at "
            "least one: end the record with the assistant message of an answer"
        )
    node, num_before = inside
    begin, end = search.depth - num_before, search.depth - num_before + len(node.messages)
    before = f"before it, with messages[{begin - 1}], or " if begin else ""
    return (
        f"it ends with messages[{last}], in the middle of what one request brought (messages[{begin}] to "
        f"messages[{end - 1}] of its history are {_place(node)}). States are where requests and answers end: end the "
        f"record {before}with messages[{end - 1}], or with an answer to it"
    )


def _left(told: ToldHistories, history: RecordHistory, search: Search, lenient: bool) -> str:
    """The record leaves the known histories at the message behind the last one that was read."""
    index = search.depth
    new = history.message_at(index)
    best: tuple[tuple[bool, int], Found, Node] | None = None
    for key in reversed(search.places):
        for old, node in told.after(key)[: -_MAX_COMPARED - 1 : -1]:
            old, shown = (told.clean(old), told.clean(new)) if index == 0 else (old, new)
            differs = list(message_differences(old, shown, f"/messages/{index}", lenient))
            differs = differs or list(message_differences(old, shown, f"/messages/{index}", False))
            # Messages of two roles are the least alike, in however few fields they differ.
            rank = (old.role != new.role, len(differs))
            if differs and (best is None or rank < best[0]):
                best = (rank, differs[0], node)
    nearest, ends = _nearest(told, search)
    if best is None:
        return _never_sent(history, index, nearest, ends)
    _, found, node = best
    at = f"in {_place(node)}"
    text = f"{_differs(found, at)}. {_until(nearest, ends)}"
    return f"{text}. {_remedy(found, new, node, index)}"


def _never_sent(history: RecordHistory, index: int, nearest: Node, ends: int) -> str:
    num = len(history.digests)
    what = f"messages[{index}]" if index == num - 1 else f"messages[{index}] to messages[{num - 1}]"
    new = history.message_at(index)
    shown = _text(shown_values(None, new.to_chat())["new"])
    return (
        f"/messages/{index} is not in the session's history: absent there, {shown} in the record. No request that "
        f"brought {what} was answered, so no answer was made from it. Leave it out: the record may end with "
        f"messages[{ends - 1}] ({_place(nearest)})"
    )


def _remedy(found: Found, new: Message, node: Node, index: int) -> str:
    if found[0].endswith("/role") or new.role != "assistant":
        return "messages must be those of the requests, in their order; leave out what was never sent to the model"
    if node.kind == "response":
        return "Keep assistant messages as the model gave them: text, reasoning_content and tool calls"
    return "Keep assistant messages as they were sent in the requests"


def _nearest(told: ToldHistories, search: Search) -> tuple[Node, int]:
    """The newest state at or above the places that were read last, and the number of messages that it ends after."""
    found: list[tuple[int, int, Node]] = []
    for key in search.places:
        inside = told.inside(key)
        states = told.states(key)
        if states:
            found.append((search.depth, states[-1].node_id, states[-1]))
        elif inside is not None and inside[0].parent is not None:
            parent = inside[0].parent
            found.append((search.depth - inside[1], parent.node_id, parent))
    ends, _, node = max(found, key=lambda item: item[:2])
    return node, ends


def _until(nearest: Node, ends: int) -> str:
    if nearest.kind == "root":
        return "Not one committed state is shared"
    return f"The nearest committed state is {_place(nearest)}, which ends with messages[{ends - 1}]"


def _differs(found: Found, at: str = "there") -> str:
    pointer, was, now = found
    values = shown_values(was, now)
    return f"{pointer} differs: {_value(values, 'old')} {at}, {_value(values, 'new')} in the record"


def _value(values: JsonObject, side: str) -> str:
    return "absent" if values[side] is None else _text(values[side])


def _text(value: object) -> str:
    return json.dumps(value)


def _place(node: Node) -> str:
    request = "" if node.request_id is None else f" (request {node.request_id})"
    return f"{node.kind} {node.node_id}{request}"


def _name(states: Sequence[Node]) -> str:
    return _place(states[-1]) if states else "nothing is committed there"
