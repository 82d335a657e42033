"""CISPO: the clipped ratio weighs the token, and every token keeps its gradient (MiniMax 2025, "MiniMax-M1")."""

from __future__ import annotations

import torch

from silva.train.losses.clip import clamp_ratio
from silva.train.losses.tokens import clamp_log_ratio
from silva.train.options import ClipOptions


def cispo(
    new_N: torch.Tensor,
    old_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    clip: ClipOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-sg(clip(exp(new - old))) * A * new; and where the ratio lay outside the range."""
    ratio_N = clamp_log_ratio(new_N - old_N).detach().exp()
    weight_N = clamp_ratio(ratio_N, clip)
    return -weight_N * advantages_N * new_N, weight_N != ratio_N
