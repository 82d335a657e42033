"""Canonical conversation types: what every protocol's request is projected to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
JsonObject = dict[str, Any]

MEDIA_PREFIX = "media:sha256:"
"""Comes before the digest of an image's bytes where rows refer to it."""
EMPTY_TOOL_RESULT = "(no output)"
"""Replaces an empty tool result, so that every template has a text to render."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One function call of an assistant turn."""

    id: str
    """Unique in the session."""
    name: str
    """Name of the function."""
    arguments: str
    """Raw JSON text as the model wrote it; it may be broken."""

    def to_chat(self) -> JsonObject:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """An image in a message."""

    digest: str
    """Hex SHA-256 of its bytes, or of its address where it has one."""
    url: str | None = None
    """Its web address; None where its bytes are kept."""

    @property
    def reference(self) -> str:
        """What refers to the image in rows: its address, or the digest of its bytes."""
        return self.url or MEDIA_PREFIX + self.digest

    def to_chat(self) -> JsonObject:
        return {"type": "image_url", "image_url": {"url": self.reference}}


Part = str | Image


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message in canonical form.

    In `parts` no text is empty and none follows another.

    Example: `Message(role="tool", content="42", tool_call_id="call_1")`.
    """

    role: Role
    """Who speaks."""
    content: str = ""
    """All texts, joined; empty without text."""
    reasoning: str = ""
    """Thoughts of an assistant."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of an assistant."""
    tool_call_id: str | None = None
    """The call that a tool message answers; None where it names none."""
    parts: tuple[Part, ...] = ()
    """Images with the texts around them, in order; empty without images."""

    def __post_init__(self) -> None:
        if self.role != "assistant" and (self.reasoning or self.tool_calls):
            raise ValueError(f"a {self.role} message holds reasoning or tool calls, which only an assistant can have")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError(f"a {self.role} message holds a tool_call_id, which only a tool message can have")
        if self.parts and not (self.role != "assistant" and self.images and self.content == text_of(self.parts)):
            raise ValueError(f"the parts of a {self.role} message hold no image, another text, or are an assistant's")

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(part for part in self.parts if isinstance(part, Image)) if self.parts else ()

    def to_chat(self) -> JsonObject:
        """The message in OpenAI Chat shape; absent fields are left out."""
        chat: JsonObject = {"role": self.role, "content": self.content}
        if self.parts:
            chat["content"] = [part_to_chat(part) for part in self.parts]
        if self.role == "assistant":
            if self.reasoning:
                chat["reasoning_content"] = self.reasoning
            if self.tool_calls:
                chat["tool_calls"] = [call.to_chat() for call in self.tool_calls]
                chat["content"] = self.content or None
        elif self.role == "tool" and self.tool_call_id is not None:
            chat["tool_call_id"] = self.tool_call_id
        return chat


def images_of(messages: Iterable[Message]) -> tuple[Image, ...]:
    """The images of messages, in order."""
    return tuple(image for message in messages if message.parts for image in message.images)


def text_of(parts: Iterable[Part]) -> str:
    """The texts among the parts, joined."""
    return "".join(part for part in parts if isinstance(part, str))


def join_texts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """The parts with neighbouring texts joined and empty ones left out; no parts at all where none is an image."""
    joined: list[Part] = []
    for is_text, run in groupby(parts, lambda part: isinstance(part, str)):
        if not is_text:
            joined += run
        elif text := text_of(run):
            joined.append(text)
    return tuple(joined) if any(isinstance(part, Image) for part in joined) else ()


def part_to_chat(part: Part) -> JsonObject:
    """A part in OpenAI Chat shape."""
    return {"type": "text", "text": part} if isinstance(part, str) else part.to_chat()


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """What selects a subtree of a session's forest: tools (OpenAI nested form) and chat template arguments."""

    tools: tuple[JsonObject, ...] = ()
    """In OpenAI nested form, in the order of the request."""
    template_kwargs: JsonObject
    """Chat template arguments."""
