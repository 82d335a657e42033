"""Canonical conversation types: what every protocol's request is projected to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
JsonObject = dict[str, Any]

EMPTY_TOOL_RESULT = "(no output)"
"""Stands for an empty tool result, so that every template has a text to render."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One function call of an assistant turn. `arguments` is the raw JSON text (maybe broken) as the model wrote it."""

    id: str
    name: str
    arguments: str

    def to_chat(self) -> JsonObject:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message in canonical form. Text parts are already joined; absent text is `""`."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        if self.role != "assistant" and (self.reasoning or self.tool_calls):
            raise ValueError(f"a {self.role} message holds reasoning or tool calls, which only an assistant can have")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError(f"a {self.role} message holds a tool_call_id, which only a tool message can have")

    def to_chat(self) -> JsonObject:
        """The message in OpenAI Chat shape; absent fields are left out."""
        chat: JsonObject = {"role": self.role, "content": self.content}
        if self.role == "assistant":
            if self.reasoning:
                chat["reasoning_content"] = self.reasoning
            if self.tool_calls:
                chat["tool_calls"] = [call.to_chat() for call in self.tool_calls]
                chat["content"] = self.content or None
        elif self.role == "tool" and self.tool_call_id is not None:
            chat["tool_call_id"] = self.tool_call_id
        return chat


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """What selects a subtree of a session's forest: tools (OpenAI nested form) and chat template arguments."""

    tools: tuple[JsonObject, ...] = ()
    template_kwargs: JsonObject
