"""Chat Completions input: one raw message to its canonical form, or a RequestError with the field's path."""

from __future__ import annotations

import msgspec

from silva.types import Message, RequestError, Role, ToolCall
from silva.wire.content import (
    ROLES,
    input_message,
    is_absent,
    read_arguments,
    read_content,
    read_name,
    read_role,
    read_text,
    tool_message,
)
from silva.wire.images import RequestImages
from silva.wire.json_in import RawObject, read_list, read_object, read_optional, read_value

_CHAT_ROLES: dict[str, Role] = {**ROLES, "tool": "tool"}


def project_message(raw: msgspec.Raw, at: str, images: RequestImages) -> Message:
    """The canonical form of one message. `at` is its path, such as `messages[3]`. Unknown keys have no meaning."""
    fields = read_object(raw, at)
    role = read_role(fields, at, _CHAT_ROLES)
    path = f"{at}.content"
    if role == "assistant":
        text = read_text(fields.get("content"), path)
        return Message(role=role, content=text, reasoning=_reasoning(fields, at), tool_calls=_tool_calls(fields, at))
    content = read_content(fields.get("content"), path, images)
    return tool_message(content, _result_id(fields, at)) if role == "tool" else input_message(role, content, path)


def _reasoning(fields: RawObject, at: str) -> str:
    for name in ("reasoning_content", "reasoning"):
        value = read_value(fields.get(name), f"{at}.{name}")
        if isinstance(value, str) and value:
            return value
    return ""


def _result_id(fields: RawObject, at: str) -> str | None:
    for name in ("tool_call_id", "id"):
        if value := read_optional(fields.get(name), f"{at}.{name}", str, "a string"):
            return value
    return None


def _tool_calls(fields: RawObject, at: str) -> tuple[ToolCall, ...]:
    raw = fields.get("tool_calls")
    if raw is None or is_absent(raw):
        return ()
    path = f"{at}.tool_calls"
    return tuple(_tool_call(item, f"{path}[{index}]") for index, item in enumerate(read_list(raw, path)))


def _tool_call(raw: msgspec.Raw, at: str) -> ToolCall:
    fields = read_object(raw, at)
    if "function" not in fields:
        raise RequestError(f"{at}.function is missing; only function calls are supported", field=f"{at}.function")
    function = read_object(fields["function"], f"{at}.function")
    name = read_name(function.get("name"), f"{at}.function.name")
    call_id = read_optional(fields.get("id"), f"{at}.id", str, "a string")
    arguments = read_arguments(function.get("arguments"), f"{at}.function.arguments")
    return ToolCall(id=call_id or "", name=name, arguments=arguments)
