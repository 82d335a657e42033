"""The parser of a run: one reasoning format, one format of calls, and the rules for all formats."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from silva.parsers.families import REASONING, TOOL_CALLS, detect, family_of
from silva.parsers.parts import ParsedCall, ParsedTurn, Piece, ReasoningFormat, ToolFormat, Tools, without_newlines


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnParser:
    """Splits sampled text with one format for reasoning and one for calls."""

    reasoning: ReasoningFormat | None = None
    """The format of reasoning; None leaves reasoning in the content."""
    tool_calls: ToolFormat | None = None
    """The format of calls; None leaves calls in the content."""
    reasoning_name: str = "none"
    """The name of `reasoning` in `REASONING`."""
    tool_call_name: str = "none"
    """The name of `tool_calls` in `TOOL_CALLS`."""

    @classmethod
    def from_names(
        cls, *, reasoning: str, tool_call: str, template: str = "", added_tokens: Collection[str] = ()
    ) -> TurnParser:
        """Parser for two option values; `auto` is what the chat template's source and the tokenizer's tokens show.

        Raises ValueError for an unknown name.
        """
        seen = detect(template, added_tokens)
        reasoning = family_of("reasoning", seen.reasoning if reasoning == "auto" else reasoning)
        tool_call = family_of("tool_call", seen.tool_calls if tool_call == "auto" else tool_call)
        return cls(
            reasoning=REASONING.get(reasoning),
            tool_calls=TOOL_CALLS.get(tool_call),
            reasoning_name=reasoning,
            tool_call_name=tool_call,
        )

    def __str__(self) -> str:
        return f"tool calls {self.tool_call_name}, reasoning {self.reasoning_name}"

    @property
    def reasoning_end(self) -> str:
        """The mark that closes the reasoning of a turn; empty where none is read."""
        return "" if self.reasoning is None else self.reasoning.end_mark

    def parse(
        self,
        text: str,
        *,
        opening: str = "",
        tools: Tools = None,
        is_call: Callable[[ParsedCall], bool] = lambda call: True,
    ) -> ParsedTurn:
        """Split a turn's text.

        `text` is what was sampled, without the end-of-turn marker; `opening` is the decoded generation prompt, which
        shows whether the turn starts inside a reasoning block. `tools` are those of the conversation: formats that
        write arguments without types take the types from them. Calls that `is_call` rejects stay text, marks included.
        """
        reasoning = ""
        if self.reasoning is not None:
            reasoning, text = self.reasoning.split(text, opening)
        if self.tool_calls is None:
            return ParsedTurn(content=text, reasoning=reasoning)
        content, calls = _split_calls(self.tool_calls, text, tools, is_call)
        return ParsedTurn(content=content, reasoning=reasoning, calls=calls)


def _split_calls(
    form: ToolFormat, text: str, tools: Tools, is_call: Callable[[ParsedCall], bool]
) -> tuple[str, tuple[ParsedCall, ...]]:
    content: list[str] = []
    calls: list[ParsedCall] = []
    at, after_call = 0, False
    while (start := form.find(text, at, tools)) >= 0:
        pieces = form.read(text, start, tools)
        made = [piece.call for piece in pieces if piece.call is not None and is_call(piece.call)]
        end = pieces[-1].end
        after_call = bool(made)
        if made:
            calls += made
            content.append(without_newlines(text[at:start], behind=form.gap))
            content.append(_left_over(text, start, pieces, is_call))
        else:
            content.append(text[at:end])
        at = end
    if not after_call or text[at:].strip("\n"):
        content.append(text[at:])
    return "".join(content), tuple(calls)


def _left_over(text: str, start: int, pieces: list[Piece], is_call: Callable[[ParsedCall], bool]) -> str:
    """What of a block stays text once its calls are taken out; its marks, too, where a call is rejected."""
    denied = any(piece.call is not None and not is_call(piece.call) for piece in pieces)
    kept: list[str] = []
    for piece in pieces:
        stays = not is_call(piece.call) if piece.call is not None else (denied if piece.is_mark else True)
        if stays:
            kept.append(text[start : piece.end])
        start = piece.end
    return "".join(kept)
