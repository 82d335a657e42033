"""Anthropic Messages input: raw messages and tools to their canonical form, or a RequestError with the field's path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from silva.types import JsonObject, Message, Part, Role, ToolCall
from silva.wire.content import (
    Content,
    input_message,
    is_absent,
    read_content,
    read_name,
    read_role,
    read_text,
    tool_message,
    unsupported_part,
)
from silva.wire.images import RequestImages
from silva.wire.json_in import RawObject, read_list, read_object, read_optional, read_string, read_value

ERROR_RESULT_MARK = "[tool error]\n"
"""Put before the text of a tool result that has `is_error`."""
_ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system"}

Note = Callable[[str], None]
"""Called with the path and type of a block without a meaning here."""


def project_system(raw: msgspec.Raw | None, images: RequestImages) -> Message | None:
    """The message of the top-level `system` field; None where it is absent or empty."""
    content = read_content(raw, "system", images)
    return input_message("system", content, "system") if content else None


def project_anthropic_message(raw: msgspec.Raw, at: str, images: RequestImages, note: Note) -> tuple[Message, ...]:
    """The canonical messages (one or more) of one item of `messages`. `at` is its path, such as `messages[3]`."""
    fields = read_object(raw, at)
    role = read_role(fields, at, _ROLES)
    content = fields.get("content")
    path = f"{at}.content"
    blocks = _blocks(content, path)
    if role == "system" or (role == "user" and blocks is None):
        return (input_message(role, read_content(content, path, images), path),)
    if role == "user":
        return _user_messages(blocks or [], path, images)
    if blocks is None:
        return (Message(role=role, content=read_text(content, path)),)
    return (_assistant_message(blocks, path, note),)


def project_tools(raw: msgspec.Raw | None) -> tuple[tuple[JsonObject, ...], tuple[str, ...]]:
    """Custom tools as nested functions, and the paths with types of the built-in ones, which were skipped."""
    if raw is None or is_absent(raw):
        return (), ()
    tools: list[JsonObject] = []
    skipped: list[str] = []
    for index, item in enumerate(read_list(raw, "tools")):
        at = f"tools[{index}]"
        fields = read_object(item, at)
        kind = read_value(fields.get("type"), f"{at}.type")
        if kind is None or kind == "custom":
            tools.append({"type": "function", "function": _function(fields, at)})
        else:
            skipped.append(f"{at}:{kind if isinstance(kind, str) else 'unknown'}"[:120])
    return tuple(tools), tuple(skipped)


def _function(fields: RawObject, at: str) -> JsonObject:
    function: JsonObject = {"name": read_name(fields.get("name"), f"{at}.name")}
    description = read_optional(fields.get("description"), f"{at}.description", str, "a string")
    if description is not None:
        function["description"] = description
    schema = read_optional(fields.get("input_schema"), f"{at}.input_schema", dict, "an object")
    if schema is not None:
        function["parameters"] = schema
    return function


def _blocks(content: msgspec.Raw | None, at: str) -> list[msgspec.Raw] | None:
    """The items of a list of blocks; None where the content is no list."""
    if content is None or bytes(memoryview(content)[:1]) != b"[":
        return None
    return read_list(content, at)


def _user_messages(blocks: list[msgspec.Raw], at: str, images: RequestImages) -> tuple[Message, ...]:
    """Tool results, and the texts and images between them, in the order of the blocks."""
    messages: list[Message] = []
    parts: list[Part] = []

    def end_run() -> None:
        content = Content.of(parts)
        parts.clear()
        if content:
            messages.append(input_message("user", content, at))

    for index, raw in enumerate(blocks):
        path = f"{at}[{index}]"
        block = read_object(raw, path)
        kind = read_value(block.get("type"), f"{path}.type")
        if kind == "tool_result":
            end_run()
            messages.append(_tool_message(block, path, images))
        elif kind == "image":
            parts.append(images.read(read_value(raw, path), path))
        else:
            parts.append(_text_of(block, kind, path))
    end_run()
    return tuple(messages) or (input_message("user", Content(""), at),)


def _tool_message(block: RawObject, at: str, images: RequestImages) -> Message:
    call_id = read_name(block.get("tool_use_id"), f"{at}.tool_use_id")
    content = read_content(block.get("content"), f"{at}.content", images)
    failed = read_optional(block.get("is_error"), f"{at}.is_error", bool, "true or false")
    return tool_message(content, call_id, mark=ERROR_RESULT_MARK if failed else "")


@dataclass
class _Parts:
    """The blocks of an assistant message, sorted by kind."""

    texts: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])


def _assistant_message(blocks: list[msgspec.Raw], at: str, note: Note) -> Message:
    parts = _Parts()
    for index, raw in enumerate(blocks):
        path = f"{at}[{index}]"
        block = read_object(raw, path)
        kind = read_value(block.get("type"), f"{path}.type")
        if kind == "tool_use":
            parts.calls.append(_call(block, path))
        elif kind == "thinking":
            parts.thoughts.append(read_string(block.get("thinking"), f"{path}.thinking"))
        elif kind == "redacted_thinking":
            note(f"{path}:redacted_thinking")
        else:
            parts.texts.append(_text_of(block, kind, path))
    return Message(
        role="assistant",
        content="".join(parts.texts),
        reasoning="".join(parts.thoughts),
        tool_calls=tuple(parts.calls),
    )


def _call(block: RawObject, at: str) -> ToolCall:
    """A call. Its arguments are the JSON text of the input in one spacing, whatever the client's was."""
    raw = block.get("input")
    arguments = "{}"
    if raw is not None and read_optional(raw, f"{at}.input", dict, "an object") is not None:
        arguments = msgspec.json.format(bytes(raw), indent=0).decode()
    return ToolCall(
        id=read_name(block.get("id"), f"{at}.id"), name=read_name(block.get("name"), f"{at}.name"), arguments=arguments
    )


def _text_of(block: RawObject, kind: object, at: str) -> str:
    if kind != "text":
        raise unsupported_part(kind, at)
    return read_string(block.get("text"), f"{at}.text")
