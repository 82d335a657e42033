"""SAPO: a soft gate in place of the clip range (Gao et al. 2025, "Soft Adaptive Policy Optimization")."""

from __future__ import annotations

import torch

from silva.train.losses.clip import ClipOptions
from silva.train.losses.tokens import clamp_log_ratio

TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05
"""How fast the gate closes with the distance of the ratio from 1, for A > 0 and otherwise."""


def sapo(
    new_N: torch.Tensor,
    old_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    clip: ClipOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-(4 / tau) * sigmoid(tau * (exp(new - old) - 1)) * A. Nothing is ever clipped."""
    ratio_N = clamp_log_ratio(new_N - old_N).exp()
    tau_N = torch.full_like(advantages_N, TAU_NEGATIVE).masked_fill(advantages_N > 0, TAU_POSITIVE)
    loss_N = -(4 / tau_N) * torch.sigmoid(tau_N * (ratio_N - 1)) * advantages_N
    return loss_N, torch.zeros_like(loss_N, dtype=torch.bool)
