"""What the model must have answered in a recorded session, and the text that our model would have sampled for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from silva.export.recordings import RecordedRequest
from silva.forest import PROFILES, Canonicaliser
from silva.parsers import TurnParser
from silva.types import JsonObject, Message, RequestError
from silva.wire import FORMATS, HistoryCache, ModelRequest

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_ID_KEYS = frozenset({"id", "call_id", "tool_call_id", "tool_use_id"})
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def answers_of(requests: Sequence[RecordedRequest]) -> list[Message | None]:
    """What the model said to each request: as recorded, else as later requests of the session show it.

    None where no later request shows an answer: nothing follows such a turn, so any text will do.
    """
    clean = Canonicaliser(tuple(PROFILES.values()))
    histories: dict[str, HistoryCache] = {}
    items = items_of(requests)
    reads = [_read(request, items, histories.setdefault(request.route, HistoryCache()), clean) for request in requests]
    return [request.answer or _shown_later(reads, index) for index, request in enumerate(requests)]


def items_of(requests: Sequence[RecordedRequest]) -> dict[str, JsonObject]:
    """Every item that a recorded answer of the session gave, by its id."""
    return {item_id: item for request in requests for item_id, item in request.items.items()}


def _read(
    request: RecordedRequest, items: Mapping[str, JsonObject], history: HistoryCache, clean: Canonicaliser
) -> ModelRequest | None:
    """The request, with the digests by which histories are compared; None where it cannot be read."""
    try:
        read = FORMATS[request.route].parse(json.dumps(as_sent_here(request, {}, items)).encode(), history)
        digests, _ = clean.identify(read.digests, read.message_at)
    except (RequestError, ValueError, RecursionError):
        return None  # the replay itself will report what is wrong with it
    return replace(read, digests=list(digests))


def _shown_later(reads: Sequence[ModelRequest | None], index: int) -> Message | None:
    """The assistant message behind the same history, else behind the same last message, else at the same place."""
    mine = reads[index]
    if mine is None:
        return None
    later = [read for read in reads[index + 1 :] if read is not None]
    num = len(mine.digests)
    for read in later:
        if read.digests[:num] == mine.digests and (said := _assistant_at(read, num)) is not None:
            return said
    for read in later:
        places = [at for at, digest in enumerate(read.digests) if digest == mine.digests[-1]]
        for at in sorted(places, key=lambda place: abs(place - (num - 1))):
            if (said := _assistant_at(read, at + 1)) is not None:
                return said
    return _assistant_at(later[0], num) if later else None


def _assistant_at(read: ModelRequest, index: int) -> Message | None:
    if index >= len(read.digests):
        return None
    message = read.message_at(index)
    return message if message.role == "assistant" else None


def as_sent_here(request: RecordedRequest, ids: dict[str, str], items: Mapping[str, JsonObject]) -> object:
    """The request's body as it would be sent to this gateway.

    Calls have the ids that were given here (`ids`: by those of the recording), references to recorded `items` are the
    items, and token limits are lifted, because the recording counted other tokens.
    """
    body = json.loads(request.body)
    if not isinstance(body, dict):
        return body
    for name in _LIMITS:
        if name in body:
            body[name] = 1 << 30
    if isinstance(body.get("input"), list):
        body["input"] = [_resolved(item, items) for item in body["input"]]
    return _renamed(body, ids) if ids else body


def _resolved(item: object, items: Mapping[str, JsonObject]) -> object:
    if isinstance(item, dict) and item.get("type") == "item_reference":
        return items.get(str(item.get("id")), item)
    return item


def _renamed(value: object, ids: dict[str, str]) -> object:
    if isinstance(value, list):
        return [_renamed(item, ids) for item in value]
    if isinstance(value, dict):
        return {
            key: ids.get(item, item) if key in _ID_KEYS and isinstance(item, str) else _renamed(item, ids)
            for key, item in value.items()
        }
    return value


def generic_parser(*, reasoning: bool, tool_calls: bool) -> TurnParser:
    """Reads what `spoken` says, whatever model family the recording came from."""
    return TurnParser.from_names(
        reasoning="generic" if reasoning else "none", tool_call="generic" if tool_calls else "none"
    )


def spoken(message: Message, parser: TurnParser, opening: str) -> tuple[str, bool]:
    """The text that a model samples for a message behind `opening`, and whether the parser reads it back as it is."""
    inside = opening.rfind(THINK_OPEN) > opening.rfind(THINK_CLOSE)
    text = ""
    if message.reasoning or (inside and parser.reasoning is not None):
        text = ("" if inside else f"{THINK_OPEN}\n") + f"{message.reasoning}\n{THINK_CLOSE}\n\n"
    text += message.content
    for call in message.tool_calls:
        text += "\n" if text else ""
        text += f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
    read = parser.parse(text, opening=opening)
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    same = (read.content, read.reasoning) == (message.content, message.reasoning)
    return text, same and [(call.name, call.arguments) for call in read.calls] == calls
