"""GSPO: one ratio a sequence (Zheng et al. 2025, "Group Sequence Policy Optimization", its token form)."""

from __future__ import annotations

import torch

from silva.train.losses.clip import clipped_surrogate
from silva.train.losses.tokens import clamp_log_ratio, sequence_mean
from silva.train.options import ClipOptions


def gspo(
    new_N: torch.Tensor,
    old_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sequence_N: torch.Tensor,
    clip: ClipOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`clipped_surrogate` of s = exp(mean over the sequence of (new - old)), the same for all its tokens.

    Each token passes the gradient of its own log-prob: the log of its ratio is new - sg(new) + sg(log s).
    """
    log_s_N = sequence_mean((new_N - old_N).detach(), sequence_N)
    return clipped_surrogate(clamp_log_ratio(new_N - new_N.detach() + log_s_N).exp(), advantages_N, clip)
