"""What all protocols read alike: texts, images, call arguments, function tools. Errors name the field's path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from silva.types import (
    EMPTY_TOOL_RESULT,
    JsonObject,
    Message,
    Part,
    RequestError,
    Role,
    join_texts,
    shown_field,
    text_of,
)
from silva.wire.images import IMAGE_KINDS, RequestImages, is_image_part
from silva.wire.json_in import RawObject, must_be, read_optional, read_value

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
        raise must_be(f"one of {', '.join(roles)}", name, f"{at}.role", "invalid_role")
    return role


@dataclass(frozen=True, slots=True)
class Content:
    """Text and images of a message."""

    text: str
    """All texts, joined."""
    parts: tuple[Part, ...] = ()
    """Texts and images in order; empty where there are no images."""

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Content:
        return cls(text_of(parts), join_texts(parts))

    def __bool__(self) -> bool:
        return bool(self.text or self.parts)


def input_message(role: Role, content: Content, at: str) -> Message:
    """A user or system message, which must not be empty. `at` is the path of its content."""
    if not content:
        raise RequestError(f"{at} is empty; a {role} message needs text", field=at, code="empty_content")
    return Message(role=role, content=content.text, parts=content.parts)


def tool_message(content: Content, call_id: str | None, *, mark: str = "") -> Message:
    """The result of a call, after `mark`. An empty result gets a fixed text."""
    if content.parts:
        parts = join_texts((mark, *content.parts))
        return Message(role="tool", content=text_of(parts), parts=parts, tool_call_id=call_id)
    return Message(role="tool", content=mark + (content.text or EMPTY_TOOL_RESULT), tool_call_id=call_id)


def is_absent(raw: msgspec.Raw | None) -> bool:
    """Whether a field is missing or null."""
    return raw is None or memoryview(raw) == _NULL


def read_name(raw: msgspec.Raw | None, at: str) -> str:
    """A string that must not be empty."""
    name = read_value(raw, at)
    if not isinstance(name, str) or not name:
        raise must_be("a non-empty string", name, at)
    return name


def read_text(raw: msgspec.Raw | None, at: str) -> str:
    """Text that comes as a string or as a list of parts, joined; absent text is empty."""
    return "".join(_part_text(part, f"{at}[{index}]") for index, part in enumerate(_parts(raw, at)))


def read_content(raw: msgspec.Raw | None, at: str, images: RequestImages) -> Content:
    """As `read_text`, for messages that may contain images as well."""
    parts = _parts(raw, at)
    if len(parts) == 1 and isinstance(parts[0], str):
        return Content(parts[0])
    return Content.of([_part(part, f"{at}[{index}]", images) for index, part in enumerate(parts)])


def _parts(raw: msgspec.Raw | None, at: str) -> list[object]:
    value = read_value(raw, at)
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise must_be("a string or a list of parts", value, at)
    return value


def _part(part: object, at: str, images: RequestImages) -> Part:
    return images.read(part, at) if is_image_part(part) else _part_text(part, at)


def _part_text(part: object, at: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise unsupported_part(None, at)
    kind = part.get("type")
    if kind in _TEXT_PARTS or (kind is None and "text" in part):
        text = part.get("text")
        if isinstance(text, str):
            return text
        raise must_be("a string", text, f"{at}.text")
    if kind == "refusal":
        text = part.get("refusal")
        return text if isinstance(text, str) else ""
    raise unsupported_part(kind, at)


def unsupported_part(kind: object, at: str) -> RequestError:
    """The error for a part that its message cannot contain."""
    if kind in IMAGE_KINDS:
        words = f"{at} is an image; only user, tool and system messages may contain images"
    else:
        words = f"{at} is a part of type {shown_field(kind)}; only texts and images are supported"
    return RequestError(words, field=at, code="unsupported_content")


def read_arguments(raw: msgspec.Raw | None, at: str) -> str:
    """The JSON text of a call's arguments, which come as that text in a string, or as the object itself."""
    if raw is None or is_absent(raw):
        return "{}"
    value = read_value(raw, at)
    return value if isinstance(value, str) else bytes(raw).decode()


def project_tools(raw: msgspec.Raw | None, at: str = "tools") -> tuple[tuple[JsonObject, ...], tuple[str, ...]]:
    """Function tools in nested form, and paths with types of the other tools, which are skipped."""
    value = read_optional(raw, at, list, "a list")
    if value is None:
        return (), ()
    tools: list[JsonObject] = []
    skipped: list[str] = []
    _collect_tools(value, at, tools, skipped)
    return tuple(tools), tuple(skipped)


def _collect_tools(
    items: Sequence[object], at: str, tools: list[JsonObject], skipped: list[str], depth: int = 0
) -> None:
    for index, item in enumerate(items):
        path = f"{at}[{index}]"
        if not isinstance(item, dict):
            raise must_be("an object", item, path)
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
        raise must_be("an object", function, path)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise must_be("a non-empty string", name, f"{path}.name")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise must_be("an object", parameters, f"{path}.parameters")
    return tool
