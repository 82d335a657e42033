"""The clipped surrogate of PPO (Schulman et al. 2017, "Proximal Policy Optimization Algorithms")."""

from __future__ import annotations

import torch

from silva.train.losses.clip import clipped_surrogate
from silva.train.losses.tokens import clamp_log_ratio
from silva.train.options import ClipOptions


def ppo_clip(
    new_N: torch.Tensor,
    old_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    clip: ClipOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`clipped_surrogate` of each token's own ratio exp(new - old)."""
    return clipped_surrogate(clamp_log_ratio(new_N - old_N).exp(), advantages_N, clip)
