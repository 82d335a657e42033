"""The clip range of the policy ratio, and the surrogate that most losses share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from silva.train.options import ClipOptions

PolicyLoss = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, ClipOptions], tuple[torch.Tensor, torch.Tensor]
]
"""`loss(new_N, old_N, advantages_N, sequence_N, clip) -> (loss_N, clipped_N)`.

`new_N` are the log-probs under the policy in training, with gradient; `old_N` those before the first update on this
data; `sequence_N` numbers the sequence of each token (all its trainable tokens are there). The loss is minimised; the
bools say where the clip range decided.
"""


def clamp_ratio(ratio_N: torch.Tensor, clip: ClipOptions) -> torch.Tensor:
    """The ratio, moved into [1 - eps_clip, 1 + eps_clip_high]."""
    high = clip.eps_clip if clip.eps_clip_high is None else clip.eps_clip_high
    return ratio_N.clamp(1 - clip.eps_clip, 1 + high)


def clipped_surrogate(
    ratio_N: torch.Tensor, advantages_N: torch.Tensor, clip: ClipOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """max(-ratio A, -clip(ratio) A), and with a dual clip c (--eps-clip-c) min(-c A, that) where A < 0.

    Second, where the clipped term won. The dual clip is from Ye et al. 2020, "Mastering Complex Control in MOBA Games".
    """
    plain_N = -ratio_N * advantages_N
    clipped_N = -clamp_ratio(ratio_N, clip) * advantages_N
    loss_N = torch.maximum(plain_N, clipped_N)
    if clip.eps_clip_c is not None:
        bounded_N = torch.minimum(-clip.eps_clip_c * advantages_N, loss_N)
        loss_N = torch.where(advantages_N < 0, bounded_N, loss_N)
    return loss_N, clipped_N > plain_N
