"""What a training step knows of its tokens besides what the samples recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

PerSample = Sequence[NDArray[np.floating]]
"""One array a sample, of its length (`_T`); what stands at tokens that are not trained does not count."""
Masks = Sequence[Sequence[int]]
"""What stands in for the loss masks of some samples, one a sample, of its length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signals:
    """Numbers of the tokens of some samples, each None where nothing asks for it.

    `old`: log-probs under the policy before the first update on this data. `reference`, `teacher`: log-probs under
    these models. `values`: the critic's value of the state before each token, before the first update. `tis_weights`:
    what a function of the user multiplies the policy loss with.
    """

    old: PerSample | None = None
    reference: PerSample | None = None
    teacher: PerSample | None = None
    values: PerSample | None = None
    tis_weights: PerSample | None = None

    def of(self, part: Sequence[int]) -> Signals:
        """Those of some of the samples, by index."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return Signals(**{name: None if all_ is None else [all_[i] for i in part] for name, all_ in held.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWeights:
    """What the policy loss of tokens is multiplied with, and how many samples have 0 because none could be had."""

    weights: PerSample
    num_failed: int = 0
