"""The turn codec: messages to token ids, turn by turn, without encoding sampled ids again."""

from silva.codec.check import CodecReport, ProofLine, StepCell
from silva.codec.codec import TurnCodec
from silva.codec.deltas import Past, SampledTail, TurnDelta

__all__ = ["CodecReport", "Past", "ProofLine", "SampledTail", "StepCell", "TurnCodec", "TurnDelta"]
