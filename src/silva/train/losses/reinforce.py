"""REINFORCE (Williams 1992), the loss of RLOO: no ratio, no clip range."""

from __future__ import annotations

import torch

from silva.train.losses.clip import ClipOptions


def reinforce(
    new_N: torch.Tensor,
    old_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    clip: ClipOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-A * new. Nothing is ever clipped."""
    return -advantages_N * new_N, torch.zeros_like(new_N, dtype=torch.bool)
