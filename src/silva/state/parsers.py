"""From sampled text to an assistant message: reasoning, content and tool calls.

The generic parser knows `<think>...</think>` at the start of a turn and, anywhere after it,
`<tool_call>{"name": ..., "arguments": ...}</tool_call>`. It takes away only the newlines that templates write around
these blocks, never a blank of the model's own. It never fails: what it cannot read stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"

PARSER_NAMES = ("none", "auto", "generic")

_CLEAR_NAME = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*(?:,\s*"(?:arguments|parameters)"\s*:(.*)|,?\s*)', re.S
)
_JSON = json.JSONDecoder()


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedCall:
    """A call as the model wrote it; `arguments` is the raw text."""

    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedTurn:
    content: str
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnParser:
    """Which blocks are read: both off leaves the whole text as content."""

    reasoning: bool
    tool_calls: bool

    @classmethod
    def from_names(cls, *, reasoning: str, tool_call: str) -> TurnParser:
        """Parser for two option values. Raises ValueError for an unknown name."""
        for option, name in (("agentic_reasoning_parser", reasoning), ("agentic_tool_call_parser", tool_call)):
            if name not in PARSER_NAMES:
                raise ValueError(f"{option} is {name!r}; known parsers are {', '.join(PARSER_NAMES)}")
        return cls(reasoning=reasoning != "none", tool_calls=tool_call != "none")

    def parse(
        self, text: str, *, opening: str = "", is_call: Callable[[ParsedCall], bool] = lambda call: True
    ) -> ParsedTurn:
        """Split a turn's text.

        `text` is what was sampled, without the end-of-turn marker; `opening` is the decoded generation prompt, which
        tells whether the turn starts inside a reasoning block. Calls that `is_call` denies stay text, marks included.
        """
        reasoning = ""
        if self.reasoning:
            reasoning, text = _split_reasoning(text, opening)
        if not self.tool_calls or CALL_OPEN not in text:
            return ParsedTurn(content=text, reasoning=reasoning)
        content, calls = _split_calls(text, is_call)
        return ParsedTurn(content=content, reasoning=reasoning, calls=calls)


def _split_reasoning(text: str, opening: str) -> tuple[str, str]:
    inside = opening.rfind(THINK_OPEN) > opening.rfind(THINK_CLOSE)
    if inside:
        rest = text.removeprefix("\n") if opening.endswith(THINK_OPEN) else text
    else:
        stripped = text.lstrip("\n")
        if not stripped.startswith(THINK_OPEN):
            return "", text
        rest = stripped[len(THINK_OPEN) :].removeprefix("\n")
    thought, close, content = rest.partition(THINK_CLOSE)
    if not close:
        return rest, ""
    return thought.removesuffix("\n"), content.removeprefix("\n").removeprefix("\n")


def _split_calls(text: str, is_call: Callable[[ParsedCall], bool]) -> tuple[str, tuple[ParsedCall, ...]]:
    pieces: list[str] = []
    calls: list[ParsedCall] = []
    call: ParsedCall | None = None
    rest = text
    while CALL_OPEN in rest:
        before, mark, after = rest.partition(CALL_OPEN)
        body, close, rest = _split_body(after)
        call = read_call(body)
        if call is not None and not is_call(call):
            call = None
        if call is None:
            pieces.append(before + mark + body + close)
        else:
            calls.append(call)
            pieces.append(before.removesuffix("\n"))
    if call is None or rest.strip("\n"):
        pieces.append(rest)
    return "".join(pieces), tuple(calls)


def _split_body(text: str) -> tuple[str, str, str]:
    """Body, closing mark and what follows.

    A mark inside a string of a well-formed call closes nothing; one that the end of the turn cut is a mark.
    """
    body, close, rest = text.partition(CALL_CLOSE)
    if close and CALL_CLOSE not in rest:
        return body, close, rest
    try:
        end = _JSON.raw_decode(text, len(text) - len(text.lstrip()))[1]
    except (ValueError, RecursionError):
        return body, close, rest
    blank, mark, after = text[end:].partition(CALL_CLOSE)
    if not blank.strip():
        return text[:end] + blank, mark, after
    cut = blank.lstrip()
    return (text.removesuffix(cut), cut, "") if not mark and CALL_CLOSE.startswith(cut) else (body, close, rest)


def read_call(body: str) -> ParsedCall | None:
    """The call that the text between two call marks states, or None where no function name is clear."""
    try:
        fields = msgspec.json.decode(body.strip().encode(), type=dict[str, msgspec.Raw])
        name = msgspec.json.decode(fields["name"], type=str)
    except (msgspec.DecodeError, KeyError, UnicodeEncodeError, RecursionError):
        return _read_broken_call(body)
    if not name.strip():
        return None
    arguments = bytes(fields.get("arguments", fields.get("parameters", msgspec.Raw(b"{}")))).decode()
    if arguments.startswith('"'):
        arguments = _text_of(arguments) or arguments
    return ParsedCall(name=name, arguments=arguments)


def _read_broken_call(body: str) -> ParsedCall | None:
    found = _CLEAR_NAME.fullmatch(body)
    name = _text_of(found.group(1)) if found else None
    if found is None or not name or not name.strip():
        return None
    arguments = (found.group(2) or "").strip()
    if arguments.endswith("}") and arguments.count("}") > arguments.count("{"):
        arguments = arguments[:-1].rstrip()
    return ParsedCall(name=name, arguments=arguments)


def _text_of(quoted: str) -> str | None:
    """The text of a JSON string, or None where it is none or holds half a surrogate pair."""
    try:
        value = json.loads(quoted)
        value.encode()
    except (ValueError, AttributeError):
        return None
    return value
