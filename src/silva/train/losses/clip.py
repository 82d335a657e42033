"""The clip range of the policy ratio, and the surrogate that most losses share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from silva.types.errors import ConfigError

PolicyLoss = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, "ClipConfig"], tuple[torch.Tensor, torch.Tensor]
]
"""`loss(new_N, old_N, advantages_N, sequence_N, clip) -> (loss_N, clipped_N)`.

`new_N` are the log-probs under the policy in training, with gradient; `old_N` those before the first update on this
data; `sequence_N` numbers the sequence of each token (all its trainable tokens are there). The loss is minimised; the
bools say where the clip range decided.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipConfig:
    """The clip range of the policy ratio: [1 - eps, 1 + eps_high].

    `eps_high` None is `eps`; `dual_clip` c > 1 bounds the loss of a token with negative advantage by -c * advantage
    (Ye et al. 2020, "Mastering Complex Control in MOBA Games"), None switches that off.
    """

    eps: float = 0.2
    eps_high: float | None = None
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.eps < 1:
            raise ConfigError(f"eps_clip is {self.eps}; it must lie between 0 and 1")
        if self.eps_high is not None and not 0 < self.eps_high < float("inf"):
            raise ConfigError(f"eps_clip_high is {self.eps_high}; it must be a finite number above 0")
        if self.dual_clip is not None and not 1 < self.dual_clip < float("inf"):
            raise ConfigError(f"eps_clip_c is {self.dual_clip}; it must be a finite number above 1")

    def clamp(self, ratio_N: torch.Tensor) -> torch.Tensor:
        """The ratio, moved into the range."""
        return ratio_N.clamp(1 - self.eps, 1 + (self.eps if self.eps_high is None else self.eps_high))


def clipped_surrogate(
    ratio_N: torch.Tensor, advantages_N: torch.Tensor, clip: ClipConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """max(-ratio A, -clip(ratio) A), and with dual clip min(-c A, that) where A < 0; and where the clipped term won."""
    plain_N = -ratio_N * advantages_N
    clipped_N = -clip.clamp(ratio_N) * advantages_N
    loss_N = torch.maximum(plain_N, clipped_N)
    if clip.dual_clip is not None:
        bounded_N = torch.minimum(-clip.dual_clip * advantages_N, loss_N)
        loss_N = torch.where(advantages_N < 0, bounded_N, loss_N)
    return loss_N, clipped_N > plain_N
