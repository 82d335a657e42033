"""What every protocol reads alike: text parts, call arguments and function tools. Errors name the field's path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from silva.gateway.json_in import RawObject, read_value
from silva.types.errors import RequestError
from silva.types.messages import JsonObject, Message, Role

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_FLAT_TOOL_KEYS = ("name", "description", "parameters")
_NULL = b"null"


def read_role(fields: RawObject, at: str, roles: Mapping[str, Role]) -> Role:
    """The canonical role of the message at path `at`; `roles` are those that the protocol knows."""
    name = read_value(fields.get("role"), f"{at}.role")
    role = roles.get(name) if isinstance(name, str) else None
    if role is None:
        raise RequestError(
            f"{at}.role is {shown(name)}; it must be one of {', '.join(roles)}", field=f"{at}.role", code="invalid_role"
        )
    return role


def text_message(role: Role, content: str, at: str) -> Message:
    """A user or system message, which must say something. `at` is the path of its content."""
    if not content:
        raise RequestError(f"{at} is empty; a {role} message needs text", field=at, code="empty_content")
    return Message(role=role, content=content)


def is_absent(raw: msgspec.Raw | None) -> bool:
    """Whether a field is missing or null."""
    return raw is None or memoryview(raw) == _NULL


def read_name(raw: msgspec.Raw | None, at: str) -> str:
    """A string that must not be empty."""
    name = read_value(raw, at)
    if not isinstance(name, str) or not name:
        raise RequestError(f"{at} is {shown(name)}; it must be a non-empty string", field=at)
    return name


def read_text(raw: msgspec.Raw | None, at: str) -> str:
    """Text that comes as a string or as a list of parts, joined; absent text is empty."""
    value = read_value(raw, at)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(f"{at} is {shown(value)}; it must be a string or a list of parts", field=at)
    return "".join(_part_text(part, f"{at}[{index}]") for index, part in enumerate(value))


def _part_text(part: Any, at: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and (kind in _TEXT_PARTS or (kind is None and "text" in part)):
        text = part.get("text")
        if isinstance(text, str):
            return text
        raise RequestError(f"{at}.text is {shown(text)}; it must be a string", field=f"{at}.text")
    if kind == "refusal":
        text = part.get("refusal")
        return text if isinstance(text, str) else ""
    raise unsupported_part(kind, at)


def unsupported_part(kind: Any, at: str) -> RequestError:
    """The error for a part that is no text."""
    if isinstance(kind, str) and "image" in kind:
        words = f"{at} is an image part; images are not built yet, send text only"
    else:
        words = f"{at} is a part of type {shown(kind)}; only text parts are supported"
    return RequestError(words, field=at, code="unsupported_content")


def read_arguments(raw: msgspec.Raw | None, at: str) -> str:
    """The JSON text of a call's arguments, which come as that text in a string, or as the object itself."""
    if raw is None or is_absent(raw):
        return "{}"
    value = read_value(raw, at)
    return value if isinstance(value, str) else bytes(raw).decode()


def project_tools(raw: msgspec.Raw | None, at: str = "tools") -> tuple[tuple[JsonObject, ...], tuple[str, ...]]:
    """Function tools in nested form, and the paths with types of those that are no functions and were skipped."""
    value = read_value(raw, at)
    if value is None:
        return (), ()
    if not isinstance(value, list):
        raise RequestError(f"{at} is {shown(value)}; it must be a list", field=at)
    tools: list[JsonObject] = []
    skipped: list[str] = []
    _collect_tools(value, at, tools, skipped)
    return tuple(tools), tuple(skipped)


def _collect_tools(items: Sequence[Any], at: str, tools: list[JsonObject], skipped: list[str], depth: int = 0) -> None:
    for index, item in enumerate(items):
        path = f"{at}[{index}]"
        if not isinstance(item, dict):
            raise RequestError(f"{path} is {shown(item)}; it must be an object", field=path)
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
        function, path = {key: item[key] for key in _FLAT_TOOL_KEYS if item.get(key) is not None}, at
        tool = {"type": "function", "function": function}
    if not isinstance(function, dict):
        raise RequestError(f"{path} is {shown(function)}; it must be an object", field=path)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{path}.name is {shown(name)}; it must be a non-empty string", field=f"{path}.name")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(
            f"{path}.parameters is {shown(parameters)}; it must be an object", field=f"{path}.parameters"
        )
    return tool


def shown(value: Any) -> str:
    if value is None:
        return "missing or null"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
