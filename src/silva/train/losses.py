"""Log-probs of sampled tokens and the clipped policy loss. All per token; packing gives the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from silva.types.errors import ConfigError

MAX_LOG_RATIO = 20.0
"""Log-differences are clamped to +-20 before `exp`."""

_ENTROPY_ROWS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipConfig:
    """The clip range of the policy ratio: [1 - eps, 1 + eps_high].

    `eps_high` None is `eps`; `dual_clip` c > 1 bounds the loss of a token with negative advantage by -c * advantage
    (Ye et al. 2020, "Mastering Complex Control in MOBA Games"), None switches that off.
    """

    eps: float = 0.2
    eps_high: float | None = None
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.eps < 1:
            raise ConfigError(f"eps_clip is {self.eps}; it must lie between 0 and 1")
        if self.eps_high is not None and not 0 < self.eps_high < float("inf"):
            raise ConfigError(f"eps_clip_high is {self.eps_high}; it must be a finite number above 0")
        if self.dual_clip is not None and not 1 < self.dual_clip < float("inf"):
            raise ConfigError(f"eps_clip_c is {self.dual_clip}; it must be a finite number above 1")


def token_logprobs(logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature: float) -> torch.Tensor:
    """Natural log-probs [N], float32 or wider, of `targets_N` under softmax(logits / temperature).

    Temperature 0 (argmax sampling) is scored at temperature 1, as the engine does.
    """
    scaled_NV = _scaled(logits_NV, temperature)
    chosen_N = scaled_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1)
    return chosen_N - scaled_NV.logsumexp(dim=1)


@torch.no_grad()
def token_entropy(logits_NV: torch.Tensor, temperature: float) -> torch.Tensor:
    """Entropy [N] in nats of softmax(logits / temperature), without gradient, some rows at a time."""
    parts = [
        torch.special.entr(_scaled(part, temperature).softmax(dim=1)).sum(dim=1)
        for part in logits_NV.split(_ENTROPY_ROWS)
    ]
    return torch.cat(parts)


def _scaled(logits_NV: torch.Tensor, temperature: float) -> torch.Tensor:
    wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    return wide_NV if temperature in (0.0, 1.0) else wide_NV / temperature


def log_ratio(new_N: torch.Tensor, old_N: torch.Tensor, mask_N: torch.Tensor | None = None) -> torch.Tensor:
    """`new - old`, clamped to +-20; exactly 0, without gradient, where `mask_N` is false, whatever stands there."""
    difference_N = new_N - old_N
    if mask_N is not None:
        difference_N = torch.where(mask_N, difference_N, torch.zeros_like(difference_N))
    return difference_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_clip(
    new_N: torch.Tensor,
    old_N: torch.Tensor,
    advantages_N: torch.Tensor,
    clip: ClipConfig,
    mask_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped surrogate of PPO (Schulman et al. 2017), to be minimised.

    With rho = exp(new - old): max(-rho A, -clip(rho, 1 - eps, 1 + eps_high) A), and with dual clip min(-c A, that)
    where A < 0. Returns the loss [N] and a bool [N]: true where the clipped term won. Both are 0 and false where
    `mask_N` (bool) is false; those positions take part in nothing, not even with a NaN.
    """
    ratio_N = log_ratio(new_N, old_N, mask_N).exp()
    if mask_N is not None:
        advantages_N = torch.where(mask_N, advantages_N, torch.zeros_like(advantages_N))
    upper = 1 + (clip.eps if clip.eps_high is None else clip.eps_high)
    plain_N = -ratio_N * advantages_N
    clipped_N = -ratio_N.clamp(1 - clip.eps, upper) * advantages_N
    loss_N = torch.maximum(plain_N, clipped_N)
    if clip.dual_clip is not None:
        bounded_N = torch.minimum(-clip.dual_clip * advantages_N, loss_N)
        loss_N = torch.where(advantages_N < 0, bounded_N, loss_N)
    return loss_N, clipped_N > plain_N
