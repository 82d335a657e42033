"""What every format is made of: parsed turns, pieces of a block of calls, and reading marks and JSON that may be cut.

A format is a small declared object. It finds where a block of calls begins and splits the block into pieces that follow
each other without a gap; what becomes of the pieces is decided in one place, for all formats alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from silva.parsers.literals import quoted
from silva.types import JsonObject

_CLEAR_NAME = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*(?:,\s*"(?:arguments|parameters)"\s*:(.*)|,?\s*)', re.S
)
_NEXT_KEY = re.compile(r'\s*,\s*(?:"|\Z)')
"""Behind arguments that are whole: the call was cut in another of its fields."""
_NO_ARGUMENTS = frozenset({"name", "id", "type", "index"})
"""What a call may have beside its arguments. Any other key belongs to broken arguments, and is kept."""
_BLANKS = re.compile(r"\s*")
_JSON = json.JSONDecoder()
_WINDOW = 512
_LONGEST_WORD = 16
"""No word or escape of JSON that a window may cut is longer."""

Tools = Sequence[JsonObject] | None
"""The tools of the conversation in nested form; None where they are not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedCall:
    """A call as the model wrote it. Example: `ParsedCall(name="add", arguments='{"a": 1}')`."""

    name: str
    """The function's name."""
    arguments: str
    """The raw text of the arguments, usually a JSON object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedTurn:
    """A sampled turn, split. Example: `<think>so</think>4` gives content `4` and reasoning `so`."""

    content: str
    """The text that is neither reasoning nor a call."""
    reasoning: str = ""
    """The text of the reasoning block; empty without one."""
    calls: tuple[ParsedCall, ...] = ()
    """The calls in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A stretch of a block: a call, a mark around calls, or else text."""

    end: int
    """Where it ends in the turn's text; it begins where the piece before ends."""
    call: ParsedCall | None = None
    """The call in it; None for marks and text."""
    is_mark: bool = False
    """Whether it is a mark, which is removed together with the calls around it."""


class ToolFormat(Protocol):
    """How a family writes calls."""

    @property
    def gap(self) -> int:
        """How many newlines the family's template writes before a call."""
        ...

    def find(self, text: str, at: int, tools: Tools) -> int:
        """Where the first block from `at` on begins; -1: nowhere."""
        ...

    def read(self, text: str, start: int, tools: Tools) -> list[Piece]:
        """The pieces of the block that begins at `start`, at least one and none empty."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MarkedCalls:
    """What formats share whose block begins with one opening mark."""

    open: str
    """The mark that opens a block of calls."""
    gap: int = 0
    """How many newlines the family's template writes before a call."""

    def find(self, text: str, at: int, tools: Tools) -> int:
        return text.find(self.open, at)


class ReasoningFormat(Protocol):
    """How a family writes its thoughts."""

    @property
    def end_mark(self) -> str:
        """What closes the reasoning of a turn."""
        ...

    def split(self, text: str, opening: str) -> tuple[str, str]:
        """Reasoning, and what is left of the text. `opening` is the decoded generation prompt."""
        ...


def skip_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    return found.end() if found else at


def mark_end(text: str, at: int, mark: str, *, least: int = 0) -> int:
    """Where the `mark` at `at` ends, behind blanks, whole or cut by the end of the text; -1 where there is none.

    `least`: of a cut mark, at least so many characters must be there.
    """
    at = skip_blanks(text, at)
    if text.startswith(mark, at):
        return at + len(mark)
    num_left = len(text) - at
    return len(text) if least <= num_left < len(mark) and mark.startswith(text[at:]) else -1


def json_end(text: str, at: int) -> int:
    """Where the JSON value at `at` ends, behind blanks; -1 where there is none, or one that was cut.

    It reads a growing window, because a decoder that fails counts the lines of all its input.
    """
    at = skip_blanks(text, at)
    size = _WINDOW
    while True:
        part, is_all = text[at : at + size], at + size >= len(text)
        try:
            end = _JSON.raw_decode(part)[1]
            if end < len(part) or is_all:
                return at + end
        except json.JSONDecodeError as error:
            if is_all or not (error.msg.startswith("Unterminated") or error.pos > size - _LONGEST_WORD):
                return -1
        except (ValueError, RecursionError):
            return -1
        size *= 8


def text_until(text: str, at: int, *marks: str) -> int:
    """Where the first of `marks` begins from `at` on; the end of the text where none is."""
    found = first_of(text, at, marks)
    return found if found >= 0 else len(text)


def first_of(text: str, at: int, marks: Sequence[str]) -> int:
    """Where the first of `marks` begins from `at` on; -1: nowhere.

    It searches a growing window, so that a missing mark does not cost a search to the end each time.
    """
    size = _WINDOW
    while marks and at < len(text):
        stop = at + size
        found = [begin for mark in marks if (begin := text.find(mark, at, stop + len(mark) - 1)) >= 0]
        if found:
            return min(found)
        at, size = stop, size * 8
    return -1


def opened(text: str, at: int, mark: str) -> list[Piece]:
    """The opening mark at `at`, or nothing where another text is there."""
    return [Piece(end=at + len(mark), is_mark=True)] if text.startswith(mark, at) else []


def closed(text: str, at: int, close: str, *again: str) -> list[Piece]:
    """The closing mark at `at`, with the text before it where there is some.

    Empty where it is missing, or where one of the marks in `again`, which begin the next block, is nearer.
    """
    if not close:
        return []
    end = mark_end(text, at, close)
    if end >= 0:
        return [Piece(end=end, is_mark=True)] if end > at else []
    begin = first_of(text, at, (close, *again))
    if begin < 0 or not text.startswith(close, begin):
        return []
    left = [Piece(end=begin)] if begin > at else []
    return [*left, Piece(end=begin + len(close), is_mark=True)]


def without_newlines(text: str, *, before: int = 0, behind: int = 0) -> str:
    """`text` without up to `before` newlines at its start and up to `behind` newlines at its end."""
    for _ in range(before):
        text = text.removeprefix("\n")
    for _ in range(behind):
        text = text.removesuffix("\n")
    return text


def has_no_tools(tools: Tools) -> bool:
    """Whether a conversation is known to have no tools: a text without a mark is then not a call."""
    return tools is not None and not tools


def read_call(body: str) -> ParsedCall | None:
    """The call of a JSON object with a name, or None where no function name is clear."""
    try:
        fields = msgspec.json.decode(body.strip().encode(), type=dict[str, msgspec.Raw])
        name = msgspec.json.decode(fields["name"], type=str)
    except (msgspec.DecodeError, KeyError, UnicodeEncodeError, RecursionError):
        return _read_broken_call(body)
    if not name.strip():
        return None
    arguments = fields.get("arguments", fields.get("parameters"))
    if arguments is not None:
        return ParsedCall(name=name, arguments=unquoted(bytes(arguments).decode()))
    left = {key: bytes(value).decode() for key, value in fields.items() if key not in _NO_ARGUMENTS}
    return ParsedCall(name=name, arguments=", ".join(f"{quoted(key)}: {left[key]}" for key in left) or "{}")


def _read_broken_call(body: str) -> ParsedCall | None:
    found = _CLEAR_NAME.fullmatch(body)
    name = text_of(found.group(1)) if found else None
    if found is None or not name or not name.strip():
        return None
    arguments = (found.group(2) or "").strip()
    end = json_end(arguments, 0)
    if end >= 0 and _NEXT_KEY.match(arguments, end):
        return ParsedCall(name=name, arguments=unquoted(arguments[:end]))
    if arguments.endswith("}") and arguments.count("}") > arguments.count("{"):
        arguments = arguments[:-1].rstrip()
    return ParsedCall(name=name, arguments=arguments)


def unquoted(arguments: str) -> str:
    """The text inside arguments that are a JSON string; other arguments unchanged."""
    return (text_of(arguments) or arguments) if arguments.startswith('"') else arguments


def text_of(quoted: str) -> str | None:
    """The text of a JSON string, or None where it is not one or contains half a surrogate pair."""
    try:
        value: Any = json.loads(quoted)
        value.encode()
    except (ValueError, AttributeError):
        return None
    return value
