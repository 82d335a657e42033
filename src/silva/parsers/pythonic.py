"""Calls as a list of Python calls: `[name(key="value", other=1), name()]`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from silva.parsers.literals import keyword_arguments
from silva.parsers.parts import MarkedCalls, ParsedCall, Piece, Tools, closed, has_no_tools, skip_blanks, text_until

_NAME = re.compile(r"([A-Za-z_][\w.-]*)(?=\()")
_BARE = re.compile(r"\s*\[\s*[A-Za-z_][\w.-]*\(")


def read_python_call(text: str, at: int, name: str, close: str = "") -> tuple[int, ParsedCall]:
    """The end of a call whose arguments are in the parentheses at `at`, and the call.

    What cannot be read is the raw text between the parentheses; without a closing one, up to the mark `close`.
    """
    end, arguments = keyword_arguments(text, at)
    if end < 0:
        end = text_until(text, at, close) if close else len(text)
        return end, ParsedCall(name=name, arguments=text[at + 1 : end].strip())
    return end, ParsedCall(name=name, arguments=text[at + 1 : end - 1].strip() if arguments is None else arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonCalls(MarkedCalls):
    """A list of Python calls between two marks."""

    close: str
    """The mark behind the list."""
    bare: bool
    """Whether a list without marks is read, too, where it is the whole turn and the conversation has tools."""

    def find(self, text: str, at: int, tools: Tools) -> int:
        if self.bare and at == 0 and not has_no_tools(tools) and _BARE.match(text):
            begin = skip_blanks(text, 0)
            if skip_blanks(text, self._list(text, begin)[-1].end) == len(text):
                return begin
        return text.find(self.open, at)

    def read(self, text: str, start: int, tools: Tools) -> list[Piece]:
        if not text.startswith(self.open, start):
            return self._list(text, start)
        begin = start + len(self.open)
        pieces = [Piece(end=begin, is_mark=True), *self._list(text, begin)]
        return [*pieces, *closed(text, pieces[-1].end, self.close, self.open)]

    def _list(self, text: str, at: int) -> list[Piece]:
        """The pieces of a list at `at`, up to what is neither a call nor a separator; none where no list begins."""
        begin = skip_blanks(text, at)
        if not text.startswith("[", begin):
            return []
        at = begin + 1
        pieces = [Piece(end=at, is_mark=True)]
        while True:
            begin = skip_blanks(text, at)
            if len(pieces) > 1 and text.startswith(",", begin):
                begin = skip_blanks(text, begin + 1)
            found = _NAME.match(text, begin)
            if found is None:
                break
            pieces += [Piece(end=begin, is_mark=True)] if begin > at else []
            at, call = read_python_call(text, found.end(), found.group(1), self.close)
            pieces.append(Piece(end=at, call=call))
        end = skip_blanks(text, at)
        return [*pieces, Piece(end=end + 1, is_mark=True)] if text.startswith("]", end) else pieces
