"""gpt-oss: a turn is a sequence of messages, each on a channel, and a call is a message to a function.

Reasoning and calls are read apart, as in other families: what reads the reasoning also takes the frames off the text
that is meant for the user, and leaves calls as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from silva.parsers.parts import ParsedCall, Piece, Tools, json_end, mark_end

CHANNEL, END, CALL = "<|channel|>", "<|end|>", "<|call|>"
_FUNCTION = "to=functions."
_HEAD = re.compile(
    r"(?:<\|start\|>assistant(?P<to>[^<]*)|\A(?P<first_to>\s*to=[^<]*))?"
    r"<\|channel\|>(?P<channel>[^<]*)(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
_BODY_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)|(?=<\|channel\|>)|\Z")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """One message of the turn: its place with its frame, and that of its body."""

    start: int
    begin: int
    stop: int
    end: int
    channel: str
    function: str | None


def _parts(text: str, at: int = 0) -> Iterator[_Part]:
    while found := _HEAD.search(text, at):
        stop = _BODY_END.search(text, found.end())
        assert stop is not None
        words = found.group("channel").split()
        to = _RECIPIENT.search(" ".join(part or "" for part in found.group("to", "first_to", "channel")))
        yield _Part(
            start=found.start(),
            begin=found.end(),
            stop=stop.start(),
            end=stop.end(),
            channel=words[0] if words else "",
            function=to.group(1) if to else None,
        )
        at = stop.end()


@dataclass(frozen=True, kw_only=True, slots=True)
class HarmonyReasoning:
    """The analysis channel. Several messages on it are joined by a newline."""

    end_mark: str = END
    """What closes the reasoning of a turn."""

    def split(self, text: str, opening: str) -> tuple[str, str]:
        if CHANNEL not in text:
            return "", text
        thoughts: list[str] = []
        left: list[str] = []
        at = 0
        for part in _parts(text):
            left.append(text[at : part.start])
            at = part.end
            body = text[part.begin : part.stop]
            if part.function is None and part.channel == "analysis":
                thoughts.append(body)
            elif part.function is None and part.channel in ("final", "commentary"):
                left.append(body)
            else:
                left.append(text[part.start : part.end])
        left.append(text[at:])
        return "\n".join(thoughts), "".join(left)


@dataclass(frozen=True, kw_only=True, slots=True)
class HarmonyCalls:
    """Messages to `functions.NAME`, whatever their channel."""

    gap: int = 0
    """How many newlines the family's template writes before a call."""

    def find(self, text: str, at: int, tools: Tools) -> int:
        if text.find(_FUNCTION, at) < 0:
            return -1
        return next((part.start for part in _parts(text, at) if part.function is not None), -1)

    def read(self, text: str, start: int, tools: Tools) -> list[Piece]:
        part = next(_parts(text, start))
        assert part.function is not None
        stop = json_end(text, part.begin) if part.end == len(text) else -1
        if stop < 0 or mark_end(text, stop, CALL) != len(text):
            stop = part.stop
        arguments = text[part.begin : stop].strip()
        return [Piece(end=part.end, call=ParsedCall(name=part.function, arguments=arguments))]
