"""What a training step knows about its tokens beyond what the samples recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

PerSample = Sequence[NDArray[np.floating]]
"""One array [T] per sample; values at tokens that are not trained have no meaning."""
Masks = Sequence[Sequence[int]]
"""Loss masks that replace those of some samples, one [T] per sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signals:
    """Numbers for the tokens of some samples, each None where the objective does not need it."""

    old: PerSample | None = None
    """Log-probs under the policy before the first update on this data."""
    reference: PerSample | None = None
    """Log-probs under the reference model."""
    teacher: PerSample | None = None
    """Log-probs under the teacher of distillation."""
    values: PerSample | None = None
    """The critic's value of the state before each token, before the first update."""
    tis_weights: PerSample | None = None
    """Weights of the policy loss that a user function gave."""

    def of(self, part: Sequence[int]) -> Signals:
        """The signals of some of the samples, by index."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return Signals(**{name: None if all_ is None else [all_[i] for i in part] for name, all_ in held.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWeights:
    """What the policy loss of tokens is multiplied with."""

    weights: PerSample
    """One array [T] per sample."""
    num_failed: int = 0
    """Samples with weight 0 throughout, because the user function gave none that can be used."""
