"""The loss of a critic: squared error against the return, with the change since the rollout clipped (PPO)."""

from __future__ import annotations

import torch


def value_loss(
    values_N: torch.Tensor, old_values_N: torch.Tensor, returns_N: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """max((V - R)^2, (V' - R)^2) / 2 with V' = V moved to within `clip` of the old value; and where V' decided."""
    near_N = torch.minimum(torch.maximum(values_N, old_values_N - clip), old_values_N + clip)
    plain_N, clipped_N = (values_N - returns_N).square(), (near_N - returns_N).square()
    return torch.maximum(plain_N, clipped_N) / 2, clipped_N > plain_N
