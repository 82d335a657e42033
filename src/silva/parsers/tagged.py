"""Calls in which each argument is between tags of its own, as text without a type."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from silva.parsers.literals import quoted
from silva.parsers.parts import (
    ParsedCall,
    Piece,
    Tools,
    closed,
    first_of,
    mark_end,
    opened,
    text_until,
    without_newlines,
)
from silva.parsers.schema import Schema, json_or_string, parameters_of, typed_text

LEAST = 2
"""Of a cut closing tag, `</` at least: a call that was cut before may still get another argument."""


@dataclass(frozen=True, kw_only=True)
class TaggedCalls:
    """Blocks from `open` to `close` with calls in them, each from `call` to `call_close`.

    Example: `<tool_call><function=add><parameter=a>1</parameter></function></tool_call>`.
    """

    open: str
    """The tag that opens a block."""
    close: str
    """The tag that closes a block."""
    call: str
    """Pattern that begins a call, with a group `name`."""
    call_close: str
    """The tag that closes a call; empty where the block is the call (GLM)."""
    key: str
    """Pattern that begins an argument, with a group `key` and maybe `kind` ("true": a string, "false": JSON)."""
    value_close: str
    """The tag that closes a value."""
    starts: tuple[str, ...] = ()
    """Texts that begin a block whose opening tag is missing."""
    newlines: int = 0
    """How many newlines the family's template writes inside the tags of a value, on each side."""
    gap: int = 1
    """How many newlines the family's template writes before a block."""
    _call: re.Pattern[str] = field(init=False)
    _key: re.Pattern[str] = field(init=False)
    _value_end: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        behind = rf"\s*(?:\Z|<[^<>]{{0,40}}\Z|{self.key}|{re.escape(self._end)})"
        behind = re.sub(r"\(\?P<\w+>", "(?:", behind)
        object.__setattr__(self, "_call", re.compile(r"\s*" + self.call))
        object.__setattr__(self, "_key", re.compile(r"\s*" + self.key))
        object.__setattr__(self, "_value_end", re.compile(f"{re.escape(self.value_close)}(?={behind})"))

    @property
    def _end(self) -> str:
        return self.call_close or self.close

    def find(self, text: str, at: int, tools: Tools) -> int:
        return first_of(text, at, (self.open, *self.starts))

    def read(self, text: str, start: int, tools: Tools) -> list[Piece]:
        pieces = opened(text, start, self.open)
        at = pieces[-1].end if pieces else start
        while found := self._call.match(text, at):
            at, call = self._read_call(text, found, tools)
            pieces.append(Piece(end=at, call=call))
            if not self.call_close:
                return pieces
        if not pieces:
            return [Piece(end=start + 1)]  # no call, and nothing else that ends
        if text.startswith(self.open, start):
            return [*pieces, *closed(text, at, self.close, self.open, *self.starts)]
        end = mark_end(text, at, self.close, least=1)
        return [*pieces, Piece(end=end, is_mark=True)] if end >= 0 else pieces

    def _read_call(self, text: str, found: re.Match[str], tools: Tools) -> tuple[int, ParsedCall]:
        """The end of a call and the call: its arguments as a JSON object, else the raw text of them."""
        name = found.group("name").strip()
        parameters = parameters_of(tools, name)
        arguments: dict[str, str] = {}
        begin = at = found.end()
        while key := self._key.match(text, at):
            value_end = self._value_end.search(text, key.end())
            if value_end is None or key.group("key") in arguments:
                break
            raw = text[key.end() : value_end.start()]
            raw = without_newlines(raw, before=self.newlines, behind=self.newlines)
            arguments[key.group("key")] = self._typed(raw, key, parameters)
            at = value_end.end()
        else:
            end = mark_end(text, at, self._end, least=LEAST)
            if end >= 0:
                made = ", ".join(f"{quoted(key)}: {value}" for key, value in arguments.items())
                return end, ParsedCall(name=name, arguments=f"{{{made}}}")
        limit = text_until(text, at, self._end)
        raw = text[begin:limit].strip("\n")
        return min(len(text), limit + len(self._end)), ParsedCall(name=name, arguments=raw)

    def _typed(self, raw: str, key: re.Match[str], parameters: Schema) -> str:
        kind = key.groupdict().get("kind")
        if kind is None:
            return typed_text(raw, parameters, key.group("key"))
        return json_or_string(raw) if kind == "false" else quoted(raw)
