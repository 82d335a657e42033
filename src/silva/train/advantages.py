"""From the credit of contexts to the advantage of each sampled token. NumPy, float64, one context (sequence) at a time.

Everything runs over the n trainable tokens of a context alone (`_N`): tokens that stand between them are passed over,
without a discount and without a break.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from silva.train.algorithms import AdvantageKind
from silva.train.options import ReturnOptions
from silva.train.packing import credits_of, trainable_masks
from silva.train.signals import Masks, PerSample, Signals
from silva.types import TrainingSample

WHITEN_EPSILON = 1e-8
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig(ReturnOptions):
    """How credit becomes advantages. `kl_coef` weighs the reward-side KL, `gamma` discounts, `lambd` is that of GAE."""

    kind: AdvantageKind = "credit"
    """The way of the algorithm."""
    whiten: bool = False
    """Whiten the advantages over all tokens of the global batch."""

    @property
    def shapes_reward(self) -> bool:
        """The KL to the reference is part of the rewards."""
        return bool(self.kl_coef) and self.kind != "credit"


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceNumbers:
    """The numbers of the trainable tokens of one context."""

    credit_N: Floats
    """The credit of each token's response, which arrives with the last token, [N]."""
    kl_N: Floats | None = None
    """k1 = old - reference of each token, [N]; None without a reward-side KL."""
    values_N: Floats | None = None
    """The critic's value of the state before each token, [N]; None without a critic."""


def discounted_sums(rewards_N: Floats, discount: float) -> Floats:
    """R_t = x_t + discount * R_{t+1}."""
    out_N = np.empty_like(rewards_N)
    later = 0.0
    for t in range(len(rewards_N) - 1, -1, -1):
        later = rewards_N[t] + discount * later
        out_N[t] = later
    return out_N


def outcome(credit_N: Floats, discount: float) -> Floats:
    """What a credit that comes with the last token is worth at each token: discount^(tokens after it) * credit."""
    return credit_N * discount ** np.arange(len(credit_N) - 1, -1, -1, dtype=np.float64)


def returns(numbers: SequenceNumbers, config: AdvantageConfig) -> Floats:
    """Returns of the token rewards x_t = -kl_coef * kl_t, with the credit at the last token (REINFORCE++, Hu 2025).

    Where the responses of a context differ in credit, each sees its own come at the end.
    """
    return outcome(numbers.credit_N, config.gamma) + discounted_sums(_shaping(numbers, config), config.gamma)


def gae(numbers: SequenceNumbers, config: AdvantageConfig) -> tuple[Floats, Floats]:
    """Generalised advantage estimation (Schulman et al. 2016) and the returns that the critic learns.

    delta_t = x_t + gamma V_{t+1} - V_t with V = 0 after the last token; A_t = delta_t + gamma lambda A_{t+1};
    R_t = A_t + V_t. The rewards are those of `returns`; A is linear in them, so the part of the credit is added
    in closed form.
    """
    values_N = numbers.values_N
    assert values_N is not None
    next_N = np.append(values_N[1:], 0.0)[: len(values_N)]
    deltas_N = _shaping(numbers, config) + config.gamma * next_N - values_N
    discount = config.gamma * config.lambd
    advantages_N = outcome(numbers.credit_N, discount) + discounted_sums(deltas_N, discount)
    return advantages_N, advantages_N + values_N


def whiten(parts: Sequence[Floats]) -> list[Floats]:
    """(A - mean) / sqrt(var + 1e-8), mean and unbiased variance over all tokens of all parts together.

    Exactly 0 where all are equal, which one token alone is too.
    """
    joined = np.concatenate(parts) if parts else np.empty(0)
    if not len(joined) or joined.min() == joined.max():
        return [np.zeros_like(part) for part in parts]
    mean, variance = joined.mean(), joined.var(ddof=1)
    return [(part - mean) / np.sqrt(variance + WHITEN_EPSILON) for part in parts]


def _shaping(numbers: SequenceNumbers, config: AdvantageConfig) -> Floats:
    if config.kl_coef == 0:
        return np.zeros_like(numbers.credit_N)
    assert numbers.kl_N is not None
    return -config.kl_coef * numbers.kl_N


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenAdvantages:
    """The advantages of a global batch."""

    advantages: PerSample
    """One array [T] per sample, 0 where nothing is trained."""
    returns: PerSample | None = None
    """What a critic learns, likewise; None without a critic."""
    mean_kl: float | None = None
    """Mean of k1 = old - reference over all trainable tokens; None where no KL is part of the rewards."""


def token_advantages(
    samples: Sequence[TrainingSample],
    config: AdvantageConfig,
    signals: Signals,
    *,
    loss_masks: Masks | None = None,
) -> TokenAdvantages:
    """The advantages of all tokens of a global batch, whose samples have their credit.

    A `kl_coef` needs `old` and `reference` among the signals, GAE `values`.
    """
    masks = trainable_masks(samples, loss_masks)
    parts: list[Floats] = []
    targets: list[Floats] = []
    kls: list[Floats] = []
    for i, (sample, mask_T) in enumerate(zip(samples, masks, strict=True)):
        numbers = _numbers(sample, i, mask_T, signals, config)
        if numbers.kl_N is not None:
            kls.append(numbers.kl_N)
        if config.kind == "gae":
            advantages_N, returns_N = gae(numbers, config)
            targets.append(returns_N)
        else:
            advantages_N = returns(numbers, config) if config.kind == "returns" else numbers.credit_N
        parts.append(advantages_N)
    if config.whiten:
        parts = whiten(parts)
    return TokenAdvantages(
        advantages=_spread_out(parts, masks),
        returns=_spread_out(targets, masks) if config.kind == "gae" else None,
        mean_kl=float(np.concatenate(kls).mean()) if any(map(len, kls)) else None,
    )


def _numbers(
    sample: TrainingSample, i: int, mask_T: NDArray[np.bool_], signals: Signals, config: AdvantageConfig
) -> SequenceNumbers:
    def of(values: PerSample | None) -> Floats:
        assert values is not None
        return np.asarray(values[i], dtype=np.float64)[mask_T]

    return SequenceNumbers(
        credit_N=credits_of(sample)[mask_T],
        kl_N=of(signals.old) - of(signals.reference) if config.shapes_reward else None,
        values_N=of(signals.values) if config.kind == "gae" else None,
    )


def _spread_out(parts: Sequence[Floats], masks: Sequence[NDArray[np.bool_]]) -> list[Floats]:
    out: list[Floats] = []
    for part_N, mask_T in zip(parts, masks, strict=True):
        values_T = np.zeros(len(mask_T))
        values_T[mask_T] = part_N
        out.append(values_T)
    return out
