"""From a matched request to a placement, and from sampled ids to a response: the pure middle of a turn."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import replace
from itertools import takewhile

from silva.codec import Past, SampledTail, TurnCodec, TurnDelta
from silva.forest.echo import MessagesBetween
from silva.forest.identity import is_object_text, message_digest
from silva.forest.session_forest import Match, Node, Placement, Response
from silva.parsers import ParsedTurn, Tools, TurnParser
from silva.types.errors import TransitionRefused
from silva.types.generation import GenerateResult
from silva.types.messages import Message, ToolCall


def place_turn(codec: TurnCodec, match: Match, messages_between: MessagesBetween) -> Placement:
    """Decide how the request hangs in the forest and form the new tokens.

    Raises TransitionRefused (with the index of the message in the request) where the chat template cannot do the step.
    """
    parent = match.parent

    def as_known(start: int, stop: int) -> tuple[Message, ...]:
        return match.as_known(start, messages_between(start, stop))

    if parent is not None and match.is_full:
        return _sample_again(codec, match, parent, as_known)
    if parent is not None and parent.kind == "observation":
        return _extend_observation(codec, match, parent, as_known)
    return _new_observation(codec, match, as_known)


def _sample_again(codec: TurnCodec, match: Match, parent: Node, messages_between: MessagesBetween) -> Placement:
    if parent.kind == "observation":
        earlier = next(child for child in parent.children if child.kind == "response")
        return Placement(match=match, lead_ids=tuple(earlier.ids[: earlier.lead]))
    if parent.cut and parent.ids[-1] not in codec.stop_ids:
        return Placement(match=match, continues=True)
    delta = _encode(codec, match, (), messages_between)
    return Placement(match=match, lead_ids=(*delta.observation_ids, *delta.opening_ids))


def _extend_observation(codec: TurnCodec, match: Match, parent: Node, messages_between: MessagesBetween) -> Placement:
    """A longer tail after a committed observation: its child where the tokens allow it, else a sibling.

    A run of tool results is one unit, so a longer run never becomes a child.
    """
    lower = match.at_last_turn()
    held: list[int] = []
    known: tuple[Message, ...] = ()
    node = parent
    while node.kind == "observation":
        held[:0] = node.ids
        known = (*node.messages, *known)
        assert node.parent is not None
        node = node.parent

    def first_seen(start: int, stop: int) -> tuple[Message, ...]:
        """Where messages are the same and yet not equal, the model goes on reading those that it read."""
        middle = max(start, min(stop, match.num_matched))
        at = start - lower.num_matched
        old = known[at : at + middle - start] if at >= 0 else messages_between(start, middle)
        return (*old, *messages_between(middle, stop))

    whole = _new_observation(codec, lower, first_seen)
    added = messages_between(match.num_matched, match.num_messages)
    if parent.messages[-1].role == "tool" and added[0].role == "tool":
        return whole
    ids = whole.observation_ids
    if len(ids) <= len(held) or list(ids[: len(held)]) != held:
        return whole
    return replace(whole, match=match, messages=added, observation_ids=ids[len(held) :])


def _new_observation(codec: TurnCodec, match: Match, messages_between: MessagesBetween) -> Placement:
    messages = messages_between(match.num_matched, match.num_messages)
    delta = _encode(codec, match, messages, messages_between)
    return Placement(
        match=match,
        messages=messages,
        observation_ids=array("i", delta.observation_ids),
        lead_ids=tuple(delta.opening_ids),
        marker_mismatch=delta.marker_mismatch,
    )


def _encode(
    codec: TurnCodec, match: Match, messages: tuple[Message, ...], messages_between: MessagesBetween
) -> TurnDelta:
    parent = match.parent
    try:
        if parent is None or parent.kind == "root":
            return codec.encode_root(messages, match.conversation)
        tail = SampledTail(
            message=parent.messages[-1],
            last_id=parent.ids[-1],
            cut=parent.ids[-1] not in codec.stop_ids,
            has_system=messages_between(0, 1)[0].role == "system",
            past=lambda: past_of(parent),
        )
        return codec.encode_delta(tail, messages, match.conversation)
    except TransitionRefused as refused:
        raise refused.at(_shifted(refused.field, match.num_matched)) from refused


def past_of(response: Node) -> Past:
    """The messages before a sampled turn. A turn that was continued stands there once, whole."""
    messages: list[Message] = []
    num_given: int | None = None
    for node in response.path():
        if node.kind == "response":
            num_given = len(messages) if num_given is None else num_given
            if node.continues:
                messages.pop()
        messages.extend(node.messages)
    return Past(messages=tuple(messages[:-1]), num_given=len(messages) - 1 if num_given is None else num_given)


def _shifted(field: str | None, offset: int) -> str | None:
    """`messages[i]` counted in the delta becomes `messages[i + offset]` counted in the request."""
    if field is None or not field.startswith("messages[") or "]" not in field:
        return field
    index, _, rest = field.removeprefix("messages[").partition("]")
    return f"messages[{int(index) + offset}]{rest}" if index.isdigit() else field


def read_turn(
    codec: TurnCodec,
    parser: TurnParser,
    placement: Placement,
    result: GenerateResult,
    *,
    sibling: int,
    object_calls: bool = False,
) -> tuple[Response, Message]:
    """Parse sampled ids.

    Returns what is committed, and the message that the client gets: the new part of a continued turn; with
    `object_calls` calls whose arguments are no JSON object are text in it.
    """
    key, tools = placement.match.request_key, placement.match.conversation.tools
    if not placement.continues:
        opening = codec.decode(placement.lead_ids) if placement.lead_ids else ""
        text = _text(codec, [], result)
        message = _message(parser.parse(text, opening=opening, tools=tools), key, sibling)
        told = _with_object_calls(message, parser, text, opening, tools) if object_calls else message
        other = None if told is message else told
        return Response(result=result, message=message, digest=message_digest(message), told=other), told
    lead, before = _turn_so_far(placement.match.parent)
    opening = codec.decode(lead) if lead else ""
    text = _text(codec, before, result)
    parsed = parser.parse(text, opening=opening, tools=tools)
    assert placement.match.parent is not None
    old = placement.match.parent.messages[0]
    whole = _message(parsed, key, sibling, kept=old.tool_calls)
    if object_calls:
        old_told = _with_object_calls(old, parser, codec.decode(before), opening, tools)
        new = _new_part(old_told, _with_object_calls(whole, parser, text, opening, tools))
    else:
        new = _new_part(old, whole)
    return Response(result=result, message=whole, digest=message_digest(whole), told=new), new


def _with_object_calls(message: Message, parser: TurnParser, text: str, opening: str, tools: Tools) -> Message:
    """`message` with every call that holds no JSON object left as sampled text; itself where none is so."""
    calls = tuple(call for call in message.tool_calls if is_object_text(call.arguments))
    if len(calls) == len(message.tool_calls):
        return message
    parsed = parser.parse(text, opening=opening, tools=tools, is_call=lambda call: is_object_text(call.arguments))
    return replace(message, content=parsed.content, tool_calls=calls)


def _turn_so_far(node: Node | None) -> tuple[list[int], list[int]]:
    """Lead and sampled ids of a cut turn, over all its continued parts."""
    parts: list[Node] = []
    while node is not None and node.kind == "response":
        parts.append(node)
        if not node.continues:
            break
        node = node.parent
    parts.reverse()
    sampled = [i for part in parts for i in part.sampled]
    return list(parts[0].ids[: parts[0].lead]), sampled


def _text(codec: TurnCodec, before: list[int], result: GenerateResult) -> str:
    """Text of a turn without its stop marker: the ids of its earlier parts, then those of `result`."""
    ids = result.ids
    if ids[-1] in codec.stop_ids or result.matched_stop == ids[-1]:
        ids = ids[:-1]
    text = codec.decode([*before, *ids])
    if isinstance(result.matched_stop, str):
        at = text.find(result.matched_stop, len(codec.decode(before)) if before else 0)
        text = text if at < 0 else text[:at]
    return text


def _message(parsed: ParsedTurn, key: bytes, sibling: int, *, kept: tuple[ToolCall, ...] = ()) -> Message:
    """The assistant message. Calls that a cut part of the turn already showed (`kept`) keep their ids."""
    calls = tuple(
        ToolCall(
            id=kept[index].id if index < len(kept) else _call_id(key, sibling, index),
            name=call.name,
            arguments=call.arguments,
        )
        for index, call in enumerate(parsed.calls)
    )
    return Message(role="assistant", content=parsed.content, reasoning=parsed.reasoning, tool_calls=calls)


def _call_id(key: bytes, sibling: int, index: int) -> str:
    digest = hashlib.blake2b(key + sibling.to_bytes(8, "big") + index.to_bytes(8, "big"), digest_size=8)
    return "call_" + digest.hexdigest()


def _new_part(old: Message, whole: Message) -> Message:
    """What `whole` adds. Text that the cut part showed and that now turns out to open a block is not taken back."""
    return Message(
        role="assistant",
        content=_added(old.content, whole.content),
        reasoning=_added(old.reasoning, whole.reasoning),
        tool_calls=tuple(call for call in whole.tool_calls if call not in old.tool_calls),
    )


def _added(old: str, whole: str) -> str:
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, whole, strict=False)))
    return whole[same:]
