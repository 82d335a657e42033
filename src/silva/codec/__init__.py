"""The turn codec: messages to token ids for one tokenizer and chat template, turn by turn.

Consumes canonical messages and the sampled turn before them; produces the ids of an observation and of the next turn's
opening. Only `TurnCodec.load` reads files; everything else is pure.

Invariant: the ids are those that the template's full render has at that place, except that no text of a user, a tool or
an earlier answer ever becomes a control token; sampled ids are never encoded again.

Open first: `codec`, whose head explains root, delta and slot. Then `root`, `delta` (and `whole`, where a delta depends
on the history), `slots` and `transforms` (what a template does to a text), `encoder` (text to ids).
"""

from silva.codec.check import CodecReport, ProofLine, StepCell
from silva.codec.codec import TurnCodec
from silva.codec.deltas import Past, SampledTail, TurnDelta
from silva.codec.options import CodecOptions

__all__ = ["CodecOptions", "CodecReport", "Past", "ProofLine", "SampledTail", "StepCell", "TurnCodec", "TurnDelta"]
