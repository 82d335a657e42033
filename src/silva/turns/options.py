"""Options of the turn service: those of all that a turn goes through."""

from __future__ import annotations

from dataclasses import dataclass

from silva.codec import CodecOptions
from silva.forest import MatchOptions
from silva.inference import EngineOptions
from silva.types import SamplingOptions


@dataclass(frozen=True, kw_only=True)
class TurnServiceOptions(SamplingOptions, MatchOptions, CodecOptions, EngineOptions):
    """How turns are matched, tokenized and sampled. Declares no option of its own."""
