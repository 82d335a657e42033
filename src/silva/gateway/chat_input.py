"""Chat Completions input: one raw message or tool to its canonical form, or a RequestError with the field's path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from silva.gateway.json_in import RawObject, read_list, read_object, read_value
from silva.types.errors import RequestError
from silva.types.messages import EMPTY_TOOL_RESULT, JsonObject, Message, Role, ToolCall

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_NULL = b"null"


def project_message(raw: msgspec.Raw, at: str) -> Message:
    """The canonical form of one message. `at` is its path, such as `messages[3]`. Unknown keys have no meaning."""
    fields = read_object(raw, at)
    name = read_value(fields.get("role"), f"{at}.role")
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise RequestError(
            f"{at}.role is {_shown(name)}; it must be one of {', '.join(_ROLES)}",
            field=f"{at}.role",
            code="invalid_role",
        )
    content = _text(fields.get("content"), f"{at}.content")
    if role == "assistant":
        return Message(role=role, content=content, reasoning=_reasoning(fields, at), tool_calls=_tool_calls(fields, at))
    if role == "tool":
        return Message(role=role, content=content or EMPTY_TOOL_RESULT, tool_call_id=_result_id(fields, at))
    if not content:
        raise RequestError(
            f"{at}.content is empty; a {role} message needs text", field=f"{at}.content", code="empty_content"
        )
    return Message(role=role, content=content)


def _text(raw: msgspec.Raw | None, at: str) -> str:
    value = read_value(raw, at)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(f"{at} is {_shown(value)}; it must be a string or a list of parts", field=at)
    return "".join(_part_text(part, f"{at}[{index}]") for index, part in enumerate(value))


def _part_text(part: Any, at: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and (kind in _TEXT_PARTS or (kind is None and "text" in part)):
        text = part.get("text")
        if isinstance(text, str):
            return text
        raise RequestError(f"{at}.text is {_shown(text)}; it must be a string", field=f"{at}.text")
    if kind == "refusal":
        text = part.get("refusal")
        return text if isinstance(text, str) else ""
    if isinstance(kind, str) and "image" in kind:
        raise RequestError(
            f"{at} is an image part; images in requests are not supported yet, send text only",
            field=at,
            code="unsupported_content",
        )
    raise RequestError(
        f"{at} is a part of type {_shown(kind)}; only text parts are supported", field=at, code="unsupported_content"
    )


def _reasoning(fields: RawObject, at: str) -> str:
    for name in ("reasoning_content", "reasoning"):
        value = read_value(fields.get(name), f"{at}.{name}")
        if isinstance(value, str) and value:
            return value
    return ""


def _result_id(fields: RawObject, at: str) -> str | None:
    for name in ("tool_call_id", "id"):
        value = read_value(fields.get(name), f"{at}.{name}")
        if isinstance(value, str) and value:
            return value
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{at}.{name} is {_shown(value)}; it must be a string", field=f"{at}.{name}")
    return None


def _tool_calls(fields: RawObject, at: str) -> tuple[ToolCall, ...]:
    raw = fields.get("tool_calls")
    if raw is None or bytes(raw) == _NULL:
        return ()
    path = f"{at}.tool_calls"
    return tuple(_tool_call(item, f"{path}[{index}]") for index, item in enumerate(read_list(raw, path)))


def _tool_call(raw: msgspec.Raw, at: str) -> ToolCall:
    fields = read_object(raw, at)
    if "function" not in fields:
        raise RequestError(f"{at}.function is missing; only function calls are supported", field=f"{at}.function")
    function = read_object(fields["function"], f"{at}.function")
    name = read_value(function.get("name"), f"{at}.function.name")
    if not isinstance(name, str) or not name:
        raise RequestError(
            f"{at}.function.name is {_shown(name)}; it must be a non-empty string", field=f"{at}.function.name"
        )
    call_id = read_value(fields.get("id"), f"{at}.id")
    if call_id is not None and not isinstance(call_id, str):
        raise RequestError(f"{at}.id is {_shown(call_id)}; it must be a string", field=f"{at}.id")
    return ToolCall(id=call_id or "", name=name, arguments=_arguments(function.get("arguments"), at))


def _arguments(raw: msgspec.Raw | None, at: str) -> str:
    """The JSON text of a call's arguments, which come as that text in a string, or as the object itself."""
    if raw is None or bytes(raw) == _NULL:
        return "{}"
    value = read_value(raw, f"{at}.function.arguments")
    return value if isinstance(value, str) else bytes(raw).decode()


def project_tools(raw: msgspec.Raw | None, at: str = "tools") -> tuple[tuple[JsonObject, ...], tuple[str, ...]]:
    """Function tools in nested form, and the paths with types of those that are no functions and were skipped."""
    value = read_value(raw, at)
    if value is None:
        return (), ()
    if not isinstance(value, list):
        raise RequestError(f"{at} is {_shown(value)}; it must be a list", field=at)
    tools: list[JsonObject] = []
    skipped: list[str] = []
    _collect_tools(value, at, tools, skipped)
    return tuple(tools), tuple(skipped)


def _collect_tools(items: Sequence[Any], at: str, tools: list[JsonObject], skipped: list[str], depth: int = 0) -> None:
    for index, item in enumerate(items):
        path = f"{at}[{index}]"
        if not isinstance(item, dict):
            raise RequestError(f"{path} is {_shown(item)}; it must be an object", field=path)
        kind = item.get("type", "function" if "function" in item else None)
        if kind == "namespace" and isinstance(item.get("tools"), list) and depth < 4:
            _collect_tools(item["tools"], f"{path}.tools", tools, skipped, depth + 1)
        elif kind == "function":
            tools.append(_function_tool(item, path))
        else:
            skipped.append(f"{path}:{kind if isinstance(kind, str) else 'unknown'}"[:120])


def _function_tool(item: JsonObject, at: str) -> JsonObject:
    if "function" in item:
        function, path = item["function"], f"{at}.function"
        tool = item
    else:
        function, path = {key: value for key, value in item.items() if key != "type"}, at
        tool = {"type": "function", "function": function}
    if not isinstance(function, dict):
        raise RequestError(f"{path} is {_shown(function)}; it must be an object", field=path)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{path}.name is {_shown(name)}; it must be a non-empty string", field=f"{path}.name")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(
            f"{path}.parameters is {_shown(parameters)}; it must be an object", field=f"{path}.parameters"
        )
    return tool


def _shown(value: Any) -> str:
    if value is None:
        return "missing or null"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
