"""Responses input: instructions and typed items to canonical messages, or a RequestError with the field's path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from silva.types import Message, RequestError, Role, ToolCall, shown_field
from silva.wire.content import (
    ROLES,
    Content,
    input_message,
    is_absent,
    read_arguments,
    read_content,
    read_name,
    read_role,
    read_text,
    tool_message,
)
from silva.wire.fields import read_history_list
from silva.wire.history import HistoryCache
from silva.wire.images import RequestImages
from silva.wire.json_in import RawObject, must_be, read_object, read_string, read_value

KINDS = ("message", "reasoning", "function_call", "function_call_output", "item_reference")
_QUOTE = ord('"')


@dataclass(frozen=True, kw_only=True, slots=True)
class _Unit:
    """Raw values that form one message: a text alone (`text_role` is set), one item, or what an assistant said."""

    path: str
    raws: list[msgspec.Raw]
    text_role: Role | None = None
    first: int = 0
    assistant: bool = False


class InputHistory:
    """The messages of one request, each with its key in the cache, formed only on demand.

    Consecutive items of the assistant (reasoning, text, calls, references to such items) are one message.
    """

    def __init__(self, fields: RawObject, history: HistoryCache):
        self._history = history
        self.images = RequestImages()
        self._units: list[_Unit] = []
        instructions, text = fields.get("instructions"), fields.get("input")
        if instructions is not None and not is_absent(instructions) and memoryview(instructions) != b'""':
            self._units.append(_Unit(path="instructions", raws=[instructions], text_role="system"))
        if text is not None and memoryview(text)[0] == _QUOTE:
            self._units.append(_Unit(path="input", raws=[text], text_role="user"))
        else:
            self._units += _grouped(read_history_list(fields, "input"))

    def __len__(self) -> int:
        return len(self._units)

    def path(self, index: int) -> str:
        return self._units[index].path

    def key(self, index: int) -> bytes:
        unit = self._units[index]
        if unit.text_role is not None:
            return unit.text_role.encode() + self._history.key(unit.raws[0])
        if len(unit.raws) == 1:
            return self._history.key(unit.raws[0])
        return b"*" + self._history.conversation_key(*unit.raws)

    def project(self, index: int) -> Message:
        unit = self._units[index]
        if unit.text_role is not None:
            text = read_string(unit.raws[0], unit.path)
            return input_message(unit.text_role, Content(text), unit.path)
        if unit.assistant:
            paths = [f"input[{unit.first + offset}]" for offset in range(len(unit.raws))]
            return _joined([_assistant_part(raw, at, self._history) for raw, at in zip(unit.raws, paths, strict=True)])
        return _item_message(unit.raws[0], unit.path, self.images)


def _grouped(raws: list[msgspec.Raw]) -> list[_Unit]:
    units: list[_Unit] = []
    for index, raw in enumerate(raws):
        path = f"input[{index}]"
        assistant = _is_assistant(read_object(raw, path), path)
        if assistant and units and units[-1].assistant:
            units[-1].raws.append(raw)
        else:
            units.append(_Unit(path=path, raws=[raw], first=index, assistant=assistant))
    return units


def _kind(fields: RawObject, at: str) -> str:
    kind = read_value(fields.get("type"), f"{at}.type")
    if kind is None:
        return "item_reference" if "id" in fields and "role" not in fields else "message"
    if kind not in KINDS:
        raise RequestError(
            f"{at} is an item of type {shown_field(kind)}; it must be one of {', '.join(KINDS)}",
            field=f"{at}.type",
            code="unsupported_item",
        )
    return kind


def _is_assistant(fields: RawObject, at: str) -> bool:
    kind = _kind(fields, at)
    if kind == "message":
        return read_role(fields, at, ROLES) == "assistant"
    return kind != "function_call_output"


def _item_message(raw: msgspec.Raw, at: str, images: RequestImages) -> Message:
    """A user or system message, or the result of a call."""
    fields = read_object(raw, at)
    if _kind(fields, at) == "message":
        path = f"{at}.content"
        return input_message(read_role(fields, at, ROLES), read_content(fields.get("content"), path, images), path)
    call_id = read_name(fields.get("call_id"), f"{at}.call_id")
    return tool_message(read_content(fields.get("output"), f"{at}.output", images), call_id)


def _assistant_part(raw: msgspec.Raw, at: str, history: HistoryCache) -> Message:
    """One part of an assistant's message."""
    fields = read_object(raw, at)
    kind = _kind(fields, at)
    if kind == "message":
        return Message(role="assistant", content=read_text(fields.get("content"), f"{at}.content"))
    if kind == "reasoning":
        return Message(role="assistant", reasoning=_reasoning(fields, at))
    if kind == "function_call":
        call = ToolCall(
            id=read_name(fields.get("call_id"), f"{at}.call_id"),
            name=read_name(fields.get("name"), f"{at}.name"),
            arguments=read_arguments(fields.get("arguments"), f"{at}.arguments"),
        )
        return Message(role="assistant", tool_calls=(call,))
    item_id = read_name(fields.get("id"), f"{at}.id")
    part = history.item(item_id)
    if part is None:
        raise RequestError(
            f"{at}.id is {shown_field(item_id)}, but this session never got such an item. Send the items themselves: "
            "clients do so with `store: false`",
            field=f"{at}.id",
            code="unknown_item",
        )
    return part


def _joined(parts: Sequence[Message]) -> Message:
    if len(parts) == 1:
        return parts[0]
    return Message(
        role="assistant",
        content="".join(part.content for part in parts),
        reasoning="".join(part.reasoning for part in parts),
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
    )


def _reasoning(fields: RawObject, at: str) -> str:
    """The readable text of a reasoning item. Our own replies have it in the summary, so the summary comes first."""
    for name in ("summary", "content"):
        path = f"{at}.{name}"
        value = read_value(fields.get(name), path)
        if value is not None and not isinstance(value, (str, list)):
            raise must_be("a list of text parts", value, path)
        texts = (
            [value] if isinstance(value, str) else [_part(part, f"{path}[{i}]") for i, part in enumerate(value or ())]
        )
        if text := "".join(texts):
            return text
    return ""


def _part(part: object, at: str) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise must_be("a part with a text", part, at)
    return text
