"""On-policy distillation: the policy is drawn to a teacher on the tokens that it sampled itself.

Agarwal et al. 2024, "On-Policy Distillation of Language Models"; the gradient is that of the reverse KL.
"""

from __future__ import annotations

import torch


def distillation(new_N: torch.Tensor, teacher_N: torch.Tensor) -> torch.Tensor:
    """sg(new - teacher) * new, per token: a token that the teacher likes better becomes likelier."""
    return (new_N - teacher_N).detach() * new_N
