"""From sampled text to an assistant message: reasoning, content and tool calls.

One small declared object a family, for its calls (`TOOL_CALLS`) and its reasoning (`REASONING`). All share the rules: a
parser takes away only the newlines that templates write around these blocks, never a blank of the model's own, and it
never fails: what it cannot read stays text, or is a call with the raw text as its arguments where the name is clear.
"""

from silva.parsers.families import parser_names
from silva.parsers.parts import ParsedCall, ParsedTurn, Tools, read_call
from silva.parsers.turn import TurnParser

__all__ = ["ParsedCall", "ParsedTurn", "Tools", "TurnParser", "parser_names", "read_call"]
