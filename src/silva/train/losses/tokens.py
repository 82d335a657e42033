"""Log-probs, entropy and log-ratios of sampled tokens, and sums over the sequences that they belong to."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

MAX_LOG_RATIO = 20.0
"""Log-differences are clamped to +-20 before `exp`."""

_ENTROPY_ROWS = 1024


def token_logprobs(logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature: float) -> torch.Tensor:
    """Natural log-probs [N], float32 or wider, of `targets_N` under softmax(logits / temperature).

    Temperature 0 (argmax sampling) is scored at temperature 1, as the engine does.
    """
    scaled_NV = _scaled(logits_NV, temperature)
    chosen_N = scaled_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1)
    return chosen_N - scaled_NV.logsumexp(dim=1)


def token_entropy(logits_NV: torch.Tensor, temperature: float) -> torch.Tensor:
    """Entropy [N] in nats of softmax(logits / temperature), some rows at a time.

    Where a gradient is wanted, the rows are computed again in the backward pass instead of being kept.
    """
    parts: list[torch.Tensor] = []
    for part in logits_NV.split(_ENTROPY_ROWS):
        if torch.is_grad_enabled() and part.requires_grad:
            parts.append(checkpoint(_entropy, part, temperature, use_reentrant=False))
        else:
            parts.append(_entropy(part, temperature))
    return torch.cat(parts) if parts else logits_NV.new_zeros(0)


def _entropy(logits_NV: torch.Tensor, temperature: float) -> torch.Tensor:
    logs_NV = _scaled(logits_NV, temperature).log_softmax(dim=1)
    # ids that the model rules out have the log-prob -inf; they add 0
    present_NV = logs_NV > -torch.inf
    finite_NV = torch.where(present_NV, logs_NV, 0.0)
    return -torch.where(present_NV, logs_NV.exp() * finite_NV, 0.0).sum(dim=1)


def _scaled(logits_NV: torch.Tensor, temperature: float) -> torch.Tensor:
    wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    return wide_NV if temperature in (0.0, 1.0) else wide_NV / temperature


def clamp_log_ratio(difference_N: torch.Tensor) -> torch.Tensor:
    """A difference of log-probs, clamped to +-20: what may go through `exp`."""
    return difference_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sum(values_N: torch.Tensor, sequence_N: torch.Tensor) -> torch.Tensor:
    """For each token, the sum over all trainable tokens of its sequence: [N]. `sequence_N` numbers the sequences."""
    num = int(sequence_N.max()) + 1 if len(sequence_N) else 0
    return values_N.new_zeros(num).index_add(0, sequence_N, values_N)[sequence_N]


def sequence_mean(values_N: torch.Tensor, sequence_N: torch.Tensor) -> torch.Tensor:
    """For each token, the mean over all trainable tokens of its sequence: [N]."""
    return sequence_sum(values_N, sequence_N) / sequence_sum(torch.ones_like(values_N), sequence_N)
