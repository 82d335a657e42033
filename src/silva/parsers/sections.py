"""Calls between marks of their own, name and JSON arguments apart, in a section with marks around it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from silva.parsers.parts import (
    ParsedCall,
    Piece,
    Tools,
    closed,
    first_of,
    json_end,
    mark_end,
    opened,
    text_until,
    unquoted,
)


@dataclass(frozen=True, kw_only=True)
class SectionCalls:
    """A section with calls in it, each between its own marks: a head with the name, then JSON arguments."""

    open: str
    """The mark that opens the section."""
    close: str
    """The mark that closes the section."""
    call_open: str
    """The mark that opens a call."""
    call_close: str
    """The mark that closes a call."""
    head: str
    """Pattern of the text from `call_open` up to the arguments, with a group `name`."""
    fence: str = ""
    """A mark that may follow the arguments; empty for none."""
    gap: int = 0
    """How many newlines the family's template writes before a section."""
    _head: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_head", re.compile(rf"\s*{re.escape(self.call_open)}{self.head}"))

    def find(self, text: str, at: int, tools: Tools) -> int:
        return first_of(text, at, (self.open, self.call_open))

    def read(self, text: str, start: int, tools: Tools) -> list[Piece]:
        pieces = opened(text, start, self.open)
        at = pieces[-1].end if pieces else start
        while found := self._head.match(text, at):
            at, arguments = self._arguments(text, found.end())
            pieces.append(Piece(end=at, call=ParsedCall(name=found.group("name"), arguments=arguments)))
        if not pieces:
            return [Piece(end=start + len(self.call_open))]
        return [*pieces, *closed(text, at, self.close, self.open, self.call_open)]

    def _arguments(self, text: str, begin: int) -> tuple[int, str]:
        """The end of a call and its arguments, which begin at `begin`: JSON, else the raw text up to a mark."""
        at = json_end(text, begin)
        if at >= 0:
            fence_end = mark_end(text, at, self.fence) if self.fence else -1
            end = mark_end(text, max(at, fence_end), self.call_close)
            if end >= 0:
                return end, unquoted(text[begin:at].strip())
        limit = text_until(text, begin, self.call_close, self.close, self.call_open)
        raw = text[begin:limit].strip()
        if self.fence:
            raw = raw.removesuffix(self.fence).rstrip()
        end = limit + len(self.call_close) if text.startswith(self.call_close, limit) else limit
        return end, raw
