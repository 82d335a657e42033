"""Samples that a model could not score: logged once per call, and no reason to stop as long as it scores others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from silva.types import RunStopped, TrainingSample

log = logging.getLogger("silva.engine")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unscored:
    """A sample without a score."""

    sample: TrainingSample
    """The sample."""
    reason: str
    """Why, as the rest of a sentence that names the sample."""

    def __str__(self) -> str:
        return f"{self.sample.place}: {self.reason}"


def tell_unscored(who: str, unscored: Sequence[Unscored], num_asked: int) -> None:
    """Log how many of `num_asked` samples `who` could not score, with the first. Raises RunStopped if it was all."""
    if not unscored:
        return
    if len(unscored) == num_asked:
        raise RunStopped(f"{who} could not score any of the {num_asked} samples of a rollout step; {unscored[0]}")
    log.warning("%s could not score %d of %d samples; the first: %s", who, len(unscored), num_asked, unscored[0])
