"""Calls as JSON objects with a name: between marks, behind one mark, or bare."""

from __future__ import annotations

import re
from dataclasses import dataclass

from silva.parsers.parts import (
    MarkedCalls,
    ParsedCall,
    Piece,
    Tools,
    closed,
    has_no_tools,
    json_end,
    mark_end,
    read_call,
    skip_blanks,
    text_until,
    unquoted,
)
from silva.parsers.pythonic import read_python_call

_BARE = re.compile(r'\{\s*"name"\s*:')
_HAS_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:')
_BUILTIN_CALL = re.compile(r"\s*([A-Za-z_][\w.]*)\.call(?=\()")
_NAME = re.compile(
    r"\s*(?P<name>[^\s\[\]{}<>\"]+)\s*(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\]\s*|(?=\{))",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WrappedObject(MarkedCalls):
    """One object between two marks."""

    close: str
    """The mark behind the object."""
    gap: int = 1

    def read(self, text: str, start: int, tools: Tools) -> list[Piece]:
        begin = start + len(self.open)
        body_end, end = self._ends(text, begin)
        return [Piece(end=end, call=read_call(text[begin:body_end]))]

    def _ends(self, text: str, begin: int) -> tuple[int, int]:
        """Where the body ends and where its closing mark does.

        A mark inside a string of a well-formed call closes nothing; one that the end of the turn cut is a mark.
        """
        first = text.find(self.close, begin)
        if first < 0 or text.find(self.close, first + 1) >= 0:
            body_end = json_end(text, begin)
            end = mark_end(text, body_end, self.close) if body_end >= 0 else -1
            if end >= 0:
                return body_end, end
        return (first, first + len(self.close)) if first >= 0 else (len(text), len(text))


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectList(MarkedCalls):
    """Objects in an array, or one after another, behind an opening mark."""

    close: str = ""
    """The mark behind the list; empty where the family writes none."""

    def read(self, text: str, start: int, tools: Tools) -> list[Piece]:
        begin = start + len(self.open)
        return [Piece(end=begin, is_mark=True), *read_objects(text, begin, self.close, self.open)]


def read_objects(text: str, at: int, close: str, again: str) -> list[Piece]:
    """The pieces of objects that follow each other from `at` on, in an array or not, up to a closing mark.

    What is no object ends the list where no closing mark is known; `again` begins the next block.
    """
    pieces: list[Piece] = []
    in_array = text.startswith("[", skip_blanks(text, at))
    at = skip_blanks(text, at) + 1 if in_array else at
    if in_array:
        pieces.append(Piece(end=at, is_mark=True))
    while (begin := _object_start(text, at)) >= 0:
        end = json_end(text, begin)
        if end < 0:
            limit = text_until(text, begin, *(mark for mark in (close, again) if mark))
            broken = read_call(text[begin:limit])
            return [*pieces, Piece(end=limit, call=broken), *closed(text, limit, close, again)]
        call = read_call(text[begin:end])
        pieces += [Piece(end=begin, is_mark=True)] if begin > at else []
        pieces.append(Piece(end=end, call=call))
        at = end
    if in_array and (end := mark_end(text, at, "]")) > at:
        pieces.append(Piece(end=end, is_mark=True))
        at = end
    return [*pieces, *closed(text, at, close, again)]


def _object_start(text: str, at: int) -> int:
    """Where the next object begins behind blanks and at most one separator; -1 where there is something else."""
    at = skip_blanks(text, at)
    if text[at : at + 1] in (",", ";"):
        at = skip_blanks(text, at + 1)
    return at if text.startswith("{", at) else -1


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaObjects(MarkedCalls):
    """Objects behind `<|python_tag|>`, or a turn that begins with one where the conversation has tools.

    Behind the tag `name.call(key="value")` is a call, too; other code is not.
    """

    open: str = "<|python_tag|>"

    def find(self, text: str, at: int, tools: Tools) -> int:
        if at == 0 and not has_no_tools(tools) and text[:1] in ("{", " ", "\n"):
            begin = skip_blanks(text, 0)
            if _BARE.match(text, begin) and _is_bare_call(text, begin):
                return begin
        return text.find(self.open, at)

    def read(self, text: str, start: int, tools: Tools) -> list[Piece]:
        if not text.startswith(self.open, start):
            return read_objects(text, start, "", self.open)
        begin = start + len(self.open)
        mark = Piece(end=begin, is_mark=True)
        found = _BUILTIN_CALL.match(text, begin)
        if found:
            end, call = read_python_call(text, found.end(), found.group(1))
            return [mark, Piece(end=end, call=call)]
        return [mark, *read_objects(text, begin, "", self.open)]


def _is_bare_call(text: str, begin: int) -> bool:
    """Whether an object without a mark is a call: it has arguments, and nothing but blanks or calls behind it."""
    end = json_end(text, begin)
    call = read_call(text[begin : end if end >= 0 else len(text)])
    if call is None or not _HAS_ARGUMENTS.search(text, begin):
        return False
    return end < 0 or text[skip_blanks(text, end) :][:1] in ("", ";", ",", "{")


@dataclass(frozen=True, kw_only=True, slots=True)
class MistralCalls(MarkedCalls):
    """`[TOOL_CALLS]` and an array of objects, or a name and its arguments, with or without marks between."""

    open: str = "[TOOL_CALLS]"

    def read(self, text: str, start: int, tools: Tools) -> list[Piece]:
        begin = start + len(self.open)
        mark = Piece(end=begin, is_mark=True)
        if text[skip_blanks(text, begin) :][:1] in ("[", "{"):
            return [mark, *read_objects(text, begin, "", self.open)]
        found = _NAME.match(text, begin)
        if found is None:
            return [mark]
        end = json_end(text, found.end())
        end = end if end >= 0 else text_until(text, found.end(), self.open)
        arguments = text[found.end() : end].strip()
        return [mark, Piece(end=end, call=ParsedCall(name=found.group("name"), arguments=unquoted(arguments)))]
