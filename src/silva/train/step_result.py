"""What one optimizer step did. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SkipReason = Literal["no_trainable_tokens", "all_rejected", "nonfinite_loss", "nonfinite_gradient", "critic_only"]
"""Why an optimizer step left weights and optimizer as they were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimizer step did.

    Example: `StepResult(metrics={"train/loss": 0.12, "train/lr": 1e-6}, reason=None, num_sessions=8, num_samples=9,
    num_tokens=4100, num_trainable=900)`
    """

    metrics: dict[str, float]
    """Finite numbers only, under names `train/...`."""
    reason: SkipReason | None
    """Why the step was skipped: weights and optimizer are what they were before. None: the step was taken."""
    num_sessions: int
    """Sessions of the global batch, those without a trainable token too."""
    num_samples: int
    """Samples with a trainable token."""
    num_tokens: int
    """Tokens that went through the model."""
    num_trainable: int
    """Tokens with a loss."""

    @property
    def skipped(self) -> bool:
        return self.reason is not None
