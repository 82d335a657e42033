"""Options of the parsers."""

from __future__ import annotations

from dataclasses import dataclass

from silva.parsers import parser_names
from silva.types import opt


@dataclass(frozen=True, kw_only=True)
class ParserOptions:
    """How sampled text becomes a message."""

    agentic_tool_call_parser: str = opt("parsers", "none", choices=parser_names("tool_call"), metavar="NAME")
    """Format of tool calls in sampled text; auto: that of the chat template (docs/model-api.md)."""
    agentic_reasoning_parser: str = opt("parsers", "none", choices=parser_names("reasoning"), metavar="NAME")
    """Format of reasoning in sampled text; auto: that of the chat template (docs/model-api.md)."""
