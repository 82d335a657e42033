"""Scores of the reference model and the teacher: which can be used, and what is left out and counted.

A score that is not finite must not reach a loss. A sample with one in the reference is not trained, one with one in the
teacher loses its distillation term alone; both are named in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from silva.train.signals import Masks, PerSample
from silva.types import TrainingSample

log = logging.getLogger("silva.train")


def is_scored(mask: Sequence[int], scores_T: NDArray[np.floating]) -> bool:
    """Every token that the mask keeps has a finite score."""
    return bool(np.isfinite(scores_T[np.asarray(mask) != 0]).all())


def num_unscored(masks: Masks, scores: PerSample) -> int:
    """Samples with a trainable token that has no score."""
    return sum(not is_scored(mask, scores_T) for mask, scores_T in zip(masks, scores, strict=True))


def masks_of_scored(samples: Sequence[TrainingSample], reference: PerSample, masks: Masks) -> Masks:
    """The masks, 0 all over those samples of which the reference gives a trainable token no finite log-prob."""
    out: list[Sequence[int]] = []
    for i, (sample, mask) in enumerate(zip(samples, masks, strict=True)):
        if is_scored(mask, reference[i]):
            out.append(mask)
            continue
        at = next(t for t, bit in enumerate(mask) if bit and not np.isfinite(reference[i][t]))
        log.warning(
            "%s is not trained: the reference model gives its token %d (id %d) the log-prob %s",
            sample.place,
            at,
            sample.token_ids[at],
            reference[i][at],
        )
        out.append([0] * len(mask))
    return out


def whole_or_none(samples: Sequence[TrainingSample], teacher: PerSample) -> PerSample:
    """The teacher's scores, NaN all over a sample that has a score which is not finite."""
    out: list[NDArray[np.floating]] = []
    for sample, scores_T in zip(samples, teacher, strict=True):
        scored = is_scored(sample.loss_mask, scores_T)
        if not scored and not np.isnan(scores_T).all():
            log.warning("%s is not distilled: the teacher gives a token of it no finite log-prob", sample.place)
        out.append(scores_T if scored else np.full_like(scores_T, np.nan))
    return out
