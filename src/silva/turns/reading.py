"""From sampled ids to a response and to what the client gets of it. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import takewhile

from silva.codec import TurnCodec
from silva.forest import Node, Placement, Response, is_object_text, message_digest
from silva.parsers import ParsedTurn, Tools, TurnParser
from silva.turns.engine_client import Generation, cut_ids
from silva.types import GenerateResult, Message, TokenLogprob, ToolCall


def cut_at_stop(codec: TurnCodec, generation: Generation, stop: tuple[str, ...]) -> Generation:
    """Find a stop string that an abort split in two, which no attempt saw, and cut what came after it."""
    result = generation.result
    if not generation.num_aborts or not stop or isinstance(result.matched_stop, str):
        return generation
    text = codec.decode(result.ids)
    found = [string for string in stop if string in text]
    if not found:
        return generation
    first = min(found, key=text.index)
    cut = cut_ids(result, shortest_prefix(codec, result.ids, first))
    return replace(generation, result=replace(cut, finish_reason="stop", matched_stop=first))


def shortest_prefix(codec: TurnCodec, ids: list[int], text: str) -> int:
    """How many ids it takes until their text contains `text`; all of them where it never does."""
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        if text in codec.decode(ids[:middle]):
            high = middle
        else:
            low = middle + 1
    return low


def token_logprobs(codec: TurnCodec, result: GenerateResult) -> list[TokenLogprob]:
    """One entry per sampled id. The end-of-turn marker has no text of its own."""
    out: list[TokenLogprob] = []
    for token, logprob in zip(result.ids, result.logprobs, strict=True):
        text = "" if token in codec.stop_ids else codec.decode([token])
        out.append(TokenLogprob(text=text, logprob=logprob, data=None if "\ufffd" in text else text.encode()))
    return out


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
    """`message` with every call whose arguments are no JSON object left as sampled text; itself where all are."""
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
    """What `whole` adds to `old`. Text that the client already got is not taken back, even where it opens a block."""
    return Message(
        role="assistant",
        content=_added(old.content, whole.content),
        reasoning=_added(old.reasoning, whole.reasoning),
        tool_calls=tuple(call for call in whole.tool_calls if call not in old.tool_calls),
    )


def _added(old: str, whole: str) -> str:
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, whole, strict=False)))
    return whole[same:]
