"""The loss of a packed row: the policy loss, its corrections, then the side terms, in that order.

policy loss of each token -> times TIS weights, 0 where OPSM or TIS leave it out
+ kl_coef * KL to the reference - entropy_coef * entropy + opd_coef * distillation
-> times the weight of each token, added up
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from silva.train.corrections import opsm_dropped, tis_ratio, tis_weights
from silva.train.losses.clip import PolicyLoss
from silva.train.losses.distillation import distillation
from silva.train.losses.kl import kl_estimate
from silva.train.losses.ppo_clip import ppo_clip
from silva.train.losses.tokens import clamp_log_ratio
from silva.train.options import ClipOptions, KlOptions, TermOptions, TisOptions

WEIGHTED = ("loss", "pg_loss", "kl_loss", "opd_loss")
"""Sums of token losses times their weights; all other sums are over tokens and become means."""


def batch_values(totals: dict[str, float], num_trainable: int) -> dict[str, float]:
    """Metrics of a batch from the sums of its rows. `opd_kl` is the mean over the tokens that the teacher scored."""
    counts = {name: totals[name] for name in ("kept", "opd_scored") if name in totals}
    divisors = {"opd_kl": counts["opd_scored"]} if counts.get("opd_scored") else {}
    return {
        name: total if name in WEIGHTED else total / divisors.get(name, num_trainable)
        for name, total in totals.items()
        if name not in counts
    }


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(TermOptions):
    """What is minimised. A term with coefficient 0, or None, is not computed."""

    policy_loss: PolicyLoss = ppo_clip
    """The loss of each token from its ratio and advantage."""
    clip: ClipOptions = field(default_factory=ClipOptions)
    """The clip range of the ratio."""
    rollout_as_old: bool = False
    """Use the recorded log-probs as those of the old policy."""
    tis: TisOptions | None = None
    """Truncated importance sampling; None is off, or a user function gives the weights."""
    opsm_delta: float | None = None
    """Off-policy sequence masking above this gap in mean log-prob; None masks no sequence."""
    kl: KlOptions | None = None
    """The KL to the reference model; None measures none."""

    @property
    def has_side_terms(self) -> bool:
        """There is a loss besides the policy loss."""
        return bool(self.entropy_coef or self.opd_coef or (self.kl is not None and self.kl.kl_loss_coef))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTokens:
    """The trainable tokens of a row as tensors, all [N]."""

    new_N: torch.Tensor
    """Log-probs under the policy in training, with their gradient."""
    entropy_N: torch.Tensor
    """Entropy of the policy at each token, with its gradient."""
    rollout_N: torch.Tensor
    """Log-probs that the engine recorded."""
    advantages_N: torch.Tensor
    """Advantage of each token."""
    credits_N: torch.Tensor
    """Credit of each token's context."""
    weights_N: torch.Tensor
    """Share of each token in the loss of the global batch."""
    sequence_N: torch.Tensor
    """Number of each token's sample within the row."""
    old_N: torch.Tensor | None = None
    """Log-probs under the old policy; None: the policy in training is the old one."""
    reference_N: torch.Tensor | None = None
    """Log-probs under the reference model; None without one."""
    teacher_N: torch.Tensor | None = None
    """Log-probs under the teacher, not finite where it scored nothing; None without one."""
    tis_weights_N: torch.Tensor | None = None
    """Weights by a user function; None without one."""


def row_loss(tokens: RowTokens, config: ObjectiveConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The row's share of the loss, and its sums by metric name (float64, no gradient).

    `kept` counts the tokens that OPSM and TIS left in the policy loss.
    """
    new_N, current_N = tokens.new_N, tokens.new_N.detach()
    before_N = current_N if tokens.old_N is None else tokens.old_N
    old_N = tokens.rollout_N if config.rollout_as_old else before_N
    weights_N, kept_N, sums = _corrected(tokens, old_N, config)
    # a token left out keeps its value, which counts in the ratio of its sequence, but no gradient, were it 0 * inf
    shielded_N = torch.where(kept_N, new_N, current_N)
    policy_N, clipped_N = config.policy_loss(shielded_N, old_N, tokens.advantages_N, tokens.sequence_N, config.clip)
    policy_N = torch.where(kept_N, policy_N * weights_N, torch.zeros_like(policy_N))
    total_N = policy_N
    parts = {"pg_loss": policy_N}
    if config.kl is not None:
        assert tokens.reference_N is not None
        ratio_N = clamp_log_ratio(new_N - old_N).exp() if config.kl.use_unbiased_kl else None
        parts["kl_loss"] = kl_estimate(new_N, tokens.reference_N, config.kl.kl_loss_type, ratio_N)
        if config.kl.kl_loss_coef:
            total_N = total_N + config.kl.kl_loss_coef * parts["kl_loss"]
    if config.entropy_coef:
        total_N = total_N - config.entropy_coef * tokens.entropy_N
    if config.opd_coef:
        assert tokens.teacher_N is not None
        scored_N = tokens.teacher_N.isfinite()
        # a token that the teacher did not score is given the policy's own log-prob: no term, no gradient
        teacher_N = torch.where(scored_N, tokens.teacher_N, current_N)
        parts["opd_loss"] = distillation(new_N, teacher_N)
        total_N = total_N + config.opd_coef * parts["opd_loss"]
        sums |= {"opd_kl": current_N - teacher_N, "opd_scored": scored_N}
    loss = (total_N * tokens.weights_N).sum()
    with torch.no_grad():
        sums |= {
            "ppo_kl": old_N - current_N,
            "pg_clipfrac": clipped_N,
            "entropy": tokens.entropy_N,
            "rollout_logprob_abs_diff": ((current_N if config.rollout_as_old else before_N) - tokens.rollout_N).abs(),
            "kept": kept_N,
        }
        totals = {name: values_N.double().sum() for name, values_N in sums.items()}
        totals |= {name: (values_N.double() * tokens.weights_N).sum() for name, values_N in parts.items()}
    return loss, totals | {"loss": loss.detach().double()}


def _corrected(
    tokens: RowTokens, old_N: torch.Tensor, config: ObjectiveConfig
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """What the policy loss is multiplied with, which tokens stay in it, and what is counted of that."""
    weights_N = torch.ones_like(old_N)
    sums: dict[str, torch.Tensor] = {}
    if config.tis is not None:
        ratio_N = tis_ratio(old_N, tokens.rollout_N, tokens.sequence_N, config.tis.tis_level)
        weights_N = tis_weights(ratio_N, config.tis)
        sums |= {"tis": ratio_N, "tis_clipfrac": weights_N != ratio_N}
    elif tokens.tis_weights_N is not None:
        weights_N = tokens.tis_weights_N
        sums |= {"tis": weights_N, "tis_clipfrac": weights_N == 0}
    kept_N = weights_N != 0
    if config.opsm_delta is not None:
        dropped_N = opsm_dropped(tokens.new_N, tokens.rollout_N, tokens.credits_N, tokens.sequence_N, config.opsm_delta)
        sums["opsm_clipfrac"] = dropped_N
        kept_N = kept_N & ~dropped_N
    return weights_N, kept_N, sums
