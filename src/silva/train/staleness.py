"""Tokens that too old weights sampled are not trained."""

from __future__ import annotations

from collections.abc import Sequence

from silva.types import TrainingSample


def fresh_masks(samples: Sequence[TrainingSample], *, version: int, max_staleness: int) -> list[list[int]]:
    """The masks of the samples without the tokens of weights older than `max_staleness` train steps.

    `version` is that of the weights in training. Rewards and credit are as they were: the session stays in its group.
    """
    masks: list[list[int]] = []
    for sample in samples:
        mask = list(sample.loss_mask)
        for span in sample.version_spans:
            if 0 <= span.version < version - max_staleness:
                mask[span.start : span.start + span.length] = [0] * span.length
        masks.append(mask)
    return masks
