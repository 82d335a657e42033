"""Corrections for tokens that another policy sampled than the one that is updated.

The engine that sampled (recorded log-probs) and the trainer (old log-probs) are never quite the same policy: other
kernels, other precision, older weights. TIS weighs tokens by how much they differ; OPSM leaves out sequences that went
wrong under a policy far from today's.
"""

from __future__ import annotations

import torch

from silva.train.losses.tokens import clamp_log_ratio, sequence_mean, sequence_sum
from silva.train.options import TisLevel, TisOptions


def tis_ratio(old_N: torch.Tensor, rollout_N: torch.Tensor, sequence_N: torch.Tensor, level: TisLevel) -> torch.Tensor:
    """exp(old - rollout) of each token, of its whole sequence (the product), or that product's geometric mean. [N]

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; no gradient.
    """
    difference_N = (old_N - rollout_N).detach()
    if level == "sequence":
        difference_N = sequence_sum(difference_N, sequence_N)
    elif level == "geometric":
        difference_N = sequence_mean(difference_N, sequence_N)
    return clamp_log_ratio(difference_N).exp()


def tis_weights(ratio_N: torch.Tensor, options: TisOptions) -> torch.Tensor:
    """What the policy loss of each token is multiplied with: the ratio in the band, its edge or 0 outside. [N]"""
    if options.tis_mode == "truncate":
        return ratio_N.clamp(options.tis_clip_low, options.tis_clip)
    inside_N = (ratio_N >= options.tis_clip_low) & (ratio_N <= options.tis_clip)
    return torch.where(inside_N, ratio_N, torch.zeros_like(ratio_N))


def opsm_dropped(
    new_N: torch.Tensor, rollout_N: torch.Tensor, credits_N: torch.Tensor, sequence_N: torch.Tensor, delta: float
) -> torch.Tensor:
    """Off-policy sequence masking: true for all tokens of a sequence with credit < 0 and K > delta. [N]

    K is the mean of (rollout - new) over the sequence's trainable tokens, `credits_N` the one credit of its sequence.
    DeepSeek-AI 2025, "DeepSeek-V3.2".
    """
    gap_N = sequence_mean((rollout_N - new_N).detach(), sequence_N)
    return (credits_N < 0) & (gap_N > delta)
