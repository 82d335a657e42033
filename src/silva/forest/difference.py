"""Why a request left the known history: the first field in which it differs from what was committed there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import zip_longest

from silva.forest.echo import MessageAt, compare_echo
from silva.forest.identity import canonical_arguments, canonical_tool
from silva.forest.node import Node
from silva.forest.placement import Match
from silva.forest.session_forest import SessionForest
from silva.types import Conversation, Image, JsonObject, Message, part_to_chat

MAX_SHOWN = 400
"""Most characters of an old or new value."""
_SHOWN_BEFORE = 60
_MAX_COMPARED = 64
Found = tuple[str, object, object]
"""A JSON pointer, what was there, what came."""
CleanFirst = Callable[[Message], Message]


def first_difference(
    forest: SessionForest,
    match: Match,
    message_at: MessageAt,
    *,
    lenient: bool = False,
    path_of: Callable[[int], str] = lambda index: f"messages[{index}]",
    clean_first: CleanFirst = lambda message: message,
) -> JsonObject | None:
    """`{"pointer", "old", "new"}` of a branch or new root: a JSON pointer into the request, what was, what came.

    Compared is with what follows the matched state already, the most similar of it, and under new tools or template
    arguments with those of the newest turn. Long values are shortened to the place where they differ. None for the
    first turn of a session, and for a request that repeats a known history as it is. With `lenient`, what lenient
    matching forgives is named only where nothing else differs. `path_of` returns where in the request a message is;
    below that, fields have their Chat names in every protocol. `clean_first` gives what counts of the first message.
    """
    if match.is_full or not forest.nodes:
        return None
    parent = match.parent
    if parent is None:
        found = conversation_difference(forest.nodes[-1].conversation, match.conversation)
    else:
        found = _below(parent, match, message_at, lambda index: _pointer(path_of(index)), lenient, clean_first)
    if found is None:
        return None
    pointer, was, now = found
    return {"pointer": pointer, **shown_values(was, now)}


def conversation_difference(old: Conversation, new: Conversation) -> Found | None:
    """The first difference of tools or template arguments; None where both count as the same."""
    tools = [canonical_tool(tool) for tool in old.tools], [canonical_tool(tool) for tool in new.tools]
    return json_difference(*tools, "/tools") or json_difference(
        old.template_kwargs, new.template_kwargs, "/chat_template_kwargs"
    )


def _pointer(path: str) -> str:
    """`messages[3].content` as a JSON pointer."""
    return "/" + path.replace("[", "/").replace("]", "").replace(".", "/")


def _behind(pointer: str) -> str:
    """The place after the last item of a list."""
    above, _, last = pointer.rpartition("/")
    return f"{above}/{int(last) + 1}" if last.isdigit() else pointer


def _below(
    parent: Node,
    match: Match,
    message_at: MessageAt,
    place_of: Callable[[int], str],
    lenient: bool,
    clean_first: CleanFirst,
) -> Found | None:
    """The difference to the child of a state that the request goes along with furthest, the newest of equals."""
    best: tuple[tuple[int, int], Found] | None = None
    for child in reversed(parent.children[-_MAX_COMPARED:]):
        start = match.num_matched - (1 if child.continues else 0)
        for index, message in enumerate(_line(child), start):
            if index == match.num_messages:
                found = (_behind(place_of(index - 1)), message.to_chat(), None)
                rank = (index, 0)
                break
            (new,) = match.as_known(index, (message_at(index),))
            if index == 0:
                message, new = clean_first(message), clean_first(new)
            differs = list(message_differences(message, new, place_of(index), lenient))
            if differs:
                found, rank = differs[0], (index, -len(differs))
                break
        else:
            continue
        if best is None or rank > best[0]:
            best = (rank, found)
    return None if best is None else best[1]


def _line(node: Node) -> Iterator[Message]:
    """Messages from a node on, along the newest children."""
    while True:
        yield from node.messages
        if not node.children or node.children[-1].continues:
            return
        node = node.children[-1]


def message_differences(old: Message, new: Message, at: str, lenient: bool) -> Iterator[Found]:
    """Every field in which two messages differ."""
    if old.role != new.role:
        yield f"{at}/role", old.role, new.role
        return
    text = _trimmed if lenient and old.role == "assistant" else _same
    found = list(_texts(old, new, at, text, lenient))
    found += _calls(old, new, at, lenient)
    if old.tool_call_id != new.tool_call_id:
        found.append((f"{at}/tool_call_id", old.tool_call_id, new.tool_call_id))
    if not found and lenient and old.role == "assistant" and compare_echo(new, old) is not None:
        found = [*_texts(old, new, at, _same, False), *_calls(old, new, at, False)]
    yield from found


def _texts(old: Message, new: Message, at: str, text: Callable[[str], str], lenient: bool) -> Iterator[Found]:
    if old.parts and new.parts:
        yield from _parts_of(old, new, f"{at}/content")
    elif old.parts or new.parts:
        yield f"{at}/content", old.to_chat()["content"], new.to_chat()["content"]
    elif text(old.content) != text(new.content):
        yield f"{at}/content", old.content, new.content
    forgiven = lenient and not text(new.reasoning)
    if text(old.reasoning) != text(new.reasoning) and not forgiven:
        yield f"{at}/reasoning_content", old.reasoning or None, new.reasoning or None


def _parts_of(old: Message, new: Message, at: str) -> Iterator[Found]:
    """Differences between contents that both hold images, part by part."""
    for index, (was, now) in enumerate(zip_longest(old.parts, new.parts)):
        if was == now:
            continue
        if isinstance(was, str) and isinstance(now, str):
            yield f"{at}/{index}/text", was, now
        elif isinstance(was, Image) and isinstance(now, Image):
            yield f"{at}/{index}/image_url/url", was.reference, now.reference
        else:
            yield f"{at}/{index}", was and part_to_chat(was), now and part_to_chat(now)


def _calls(old: Message, new: Message, at: str, lenient: bool) -> Iterator[Found]:
    both = zip(old.tool_calls, new.tool_calls, strict=False)
    for index, (was, now) in enumerate(both):
        path = f"{at}/tool_calls/{index}"
        if was.name != now.name:
            yield f"{path}/function/name", was.name, now.name
        if canonical_arguments(was.arguments) != canonical_arguments(now.arguments):
            yield f"{path}/function/arguments", was.arguments, now.arguments
        if was.id != now.id and not lenient:
            yield f"{path}/id", was.id, now.id or None
    first, num_old, num_new = min(len(old.tool_calls), len(new.tool_calls)), len(old.tool_calls), len(new.tool_calls)
    if num_old != num_new:
        yield (
            f"{at}/tool_calls/{first}",
            old.tool_calls[first].to_chat() if num_old > first else None,
            new.tool_calls[first].to_chat() if num_new > first else None,
        )


def json_difference(old: object, new: object, at: str) -> Found | None:
    """The first place where two JSON values differ; an absent value is None."""
    was, now = _parts(old), _parts(new)
    if was is None or now is None or isinstance(old, dict) != isinstance(new, dict):
        return None if _text_of(old) == _text_of(new) else (at, old, new)
    for name in [*was, *(name for name in now if name not in was)]:
        path = f"{at}/{name.replace('~', '~0').replace('/', '~1')}"
        if name not in was or name not in now:
            return path, was.get(name), now.get(name)
        found = json_difference(was[name], now[name], path)
        if found is not None:
            return found
    return None


def _parts(value: object) -> dict[str, object] | None:
    """The members of an object or a list by name; None for a plain value."""
    if isinstance(value, dict):
        return {str(name): item for name, item in value.items()}  # pyright: ignore
    if isinstance(value, (list, tuple)):
        return {str(index): item for index, item in enumerate(value)}  # pyright: ignore
    return None


def _same(text: str) -> str:
    return text


def _trimmed(text: str) -> str:
    return text.strip()


def _text_of(value: object) -> str:
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def shown_values(old: object, new: object) -> JsonObject:
    """Both values; a long one as text around the first character in which the two differ."""
    texts = [value if isinstance(value, str) else _text_of(value) for value in (old, new)]
    start = 0
    if isinstance(old, str) and isinstance(new, str):
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        start = max(0, same - _SHOWN_BEFORE)
    shown: list[object] = []
    for value, text in zip((old, new), texts, strict=True):
        if len(text) <= MAX_SHOWN:
            shown.append(value)
            continue
        room = MAX_SHOWN - 2 * len("...")
        begin = min(start, len(text) - room)
        piece = text[begin : begin + room]
        shown.append(("..." if begin else "") + piece + ("..." if begin + room < len(text) else ""))
    return {"old": shown[0], "new": shown[1]}
