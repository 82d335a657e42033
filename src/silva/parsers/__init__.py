"""From sampled text to an assistant message: reasoning, content and tool calls. Pure.

Consumes the text of a turn, the opening before it and the tools; produces a `ParsedTurn`. There is one small declared
object per family for its calls (`TOOL_CALLS`) and one for its reasoning (`REASONING`), both in `families`.

Invariant: a parser never fails and loses nothing. It removes only the newlines that templates write around these
blocks, never a blank of the model's own; what it cannot read stays text, or becomes a call with the raw text as its
arguments where the name is clear.

Open first: `turn` (the rules for all families), `families` (the table), `parts` (what a format has to provide).
"""

from silva.parsers.families import parser_names
from silva.parsers.options import ParserOptions
from silva.parsers.parts import ParsedCall, ParsedTurn, Tools, read_call
from silva.parsers.turn import TurnParser

__all__ = ["ParsedCall", "ParsedTurn", "ParserOptions", "Tools", "TurnParser", "parser_names", "read_call"]
