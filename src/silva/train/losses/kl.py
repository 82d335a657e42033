"""How far the policy went from the reference model, estimated from the sampled tokens.

Schulman 2020, "Approximating KL Divergence"; the unbiased form: DeepSeek-AI 2025, "DeepSeek-V3.2".
"""

from __future__ import annotations

import torch

from silva.train.losses.tokens import clamp_log_ratio
from silva.train.options import KlType

MAX_K3 = 10.0


def kl_estimate(
    new_N: torch.Tensor, reference_N: torch.Tensor, kind: KlType, ratio_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Per token, with d = new - reference: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d, clamped to +-10.

    `low_var_kl` is k3. `ratio_N` (exp(new - old), with its gradient) makes the gradient that of the true KL, where the
    tokens were sampled by the old policy.
    """
    difference_N = new_N - reference_N
    if kind == "k1":
        estimate_N = difference_N
    elif kind == "k2":
        estimate_N = difference_N.square() / 2
    else:
        narrow_N = clamp_log_ratio(difference_N)
        estimate_N = (torch.exp(-narrow_N) - 1 + narrow_N).clamp(-MAX_K3, MAX_K3)
    return estimate_N if ratio_N is None else ratio_N * estimate_N
