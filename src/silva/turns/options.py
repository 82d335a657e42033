"""Options of the turn service: those of all that a turn goes through."""

from __future__ import annotations

from dataclasses import dataclass

from silva.codec.options import CodecOptions
from silva.forest.options import MatchOptions
from silva.inference.options import EngineOptions
from silva.types.sampling_options import SamplingOptions


@dataclass(frozen=True, kw_only=True)
class TurnServiceOptions(SamplingOptions, MatchOptions, CodecOptions, EngineOptions):
    """How turns are matched, tokenized and sampled. Declares no option of its own."""
