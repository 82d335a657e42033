"""Options of the parsers."""

from __future__ import annotations

from dataclasses import dataclass

from silva.parsers import parser_names
from silva.types.option import opt


@dataclass(frozen=True, kw_only=True)
class ParserOptions:
    """How sampled text becomes a message."""

    agentic_tool_call_parser: str = opt(
        "parsers",
        "none",
        "How tool calls are read from sampled text; auto: as the chat template writes them (names: docs/model-api.md).",
        choices=parser_names("tool_call"),
        metavar="NAME",
    )
    agentic_reasoning_parser: str = opt(
        "parsers",
        "none",
        "How reasoning is read from sampled text; auto: as the chat template writes it (names: docs/model-api.md).",
        choices=parser_names("reasoning"),
        metavar="NAME",
    )
