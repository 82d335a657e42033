"""Scores of models that stand beside the policy: what of them can be used, and what is left out and counted.

A score that is no number must not reach a loss. A sample with one in the reference is not trained, one with one in the
teacher loses its distillation term alone; both are named in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from silva.train.signals import Masks, PerSample
from silva.types.rollout import TrainingSample

log = logging.getLogger("silva.train")


def is_scored(sample: TrainingSample, scores_T: np.ndarray, mask: Sequence[int] | None = None) -> bool:
    """All of its trainable tokens have a finite score."""
    mask_T = np.asarray(sample.loss_mask if mask is None else mask) != 0
    return bool(np.isfinite(scores_T[mask_T]).all())


def num_unscored(samples: Sequence[TrainingSample], scores: PerSample, masks: Masks | None) -> int:
    """Samples with a trainable token that has no score."""
    return sum(
        not is_scored(sample, scores[i], None if masks is None else masks[i]) for i, sample in enumerate(samples)
    )


def masks_of_scored(samples: Sequence[TrainingSample], reference: PerSample, masks: Masks | None) -> list[list[int]]:
    """The masks without those samples to which the reference gives no finite log-prob somewhere."""
    out: list[list[int]] = []
    for i, sample in enumerate(samples):
        mask = sample.loss_mask if masks is None else masks[i]
        if is_scored(sample, reference[i], mask):
            out.append(list(mask))
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
    """The teacher's scores, NaN all over a sample that has one which is no number."""
    out: list[np.ndarray] = []
    for sample, scores_T in zip(samples, teacher, strict=True):
        scored = is_scored(sample, scores_T)
        if not scored and not np.isnan(scores_T).all():
            log.warning("%s is not distilled: the teacher gives a token of it no finite log-prob", sample.place)
        out.append(scores_T if scored else np.full_like(scores_T, np.nan))
    return out
