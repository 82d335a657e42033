"""The algorithms by name, as plain data: which credit, which advantages, which loss, and which options each uses.

A new one is a file with its formula (under `credit/` or `train/losses/`) and a row here; options, start-up checks, help
and the trainer read the rest from the row. This module does not import torch, so losses are named by their place.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from silva.credit import CreditFunction, centred, leave_one_out, relative_to_mean, reward_itself, standardised

if TYPE_CHECKING:
    from silva.train.losses.clip import PolicyLoss

AdvantageKind = Literal["credit", "returns", "gae"]
"""How credit becomes the advantages of tokens: as it is; as discounted returns; by GAE over a critic's values."""

CLIP = frozenset({"eps_clip", "eps_clip_high"})
DUAL_CLIP = CLIP | {"eps_clip_c"}
STD = frozenset({"disable_grpo_std_normalization"})
RETURNS = frozenset({"kl_coef", "gamma"})
CRITIC = frozenset({"lambd", "critic_lr", "value_clip", "num_critic_only_steps"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """One value of --advantage-estimator.

    Example: `Algorithm(name="maxrl", credit=relative_to_mean)`
    """

    name: str
    """The value of the option."""
    credit: CreditFunction
    """Gives the sessions of a group their credit."""
    loss: str = "silva.train.losses.ppo_clip:ppo_clip"
    """The policy loss, as "module:function"."""
    advantages: AdvantageKind = "credit"
    """How credit becomes advantages."""
    compares: bool = True
    """Credit compares the sessions of a group, so a group of one teaches nothing."""
    whitens: bool = False
    """Advantages are whitened over the global batch, whatever --normalize-advantages is."""
    ratio: bool = True
    """The loss uses the ratio to the old policy."""
    options: frozenset[str] = DUAL_CLIP
    """The `SPECIAL_OPTIONS` that this algorithm uses; the others are refused with it."""

    def policy_loss(self) -> PolicyLoss:
        """The loss function; imports torch."""
        module, _, function = self.loss.partition(":")
        return getattr(importlib.import_module(module), function)


ALGORITHMS: dict[str, Algorithm] = {
    row.name: row
    for row in (
        Algorithm(name="grpo", credit=standardised, options=DUAL_CLIP | STD),
        Algorithm(
            name="rloo",
            credit=leave_one_out,
            loss="silva.train.losses.reinforce:reinforce",
            ratio=False,
            options=frozenset(),
        ),
        Algorithm(
            name="reinforce_plus_plus",
            credit=reward_itself,
            advantages="returns",
            compares=False,
            whitens=True,
            options=DUAL_CLIP | RETURNS,
        ),
        Algorithm(name="reinforce_plus_plus_baseline", credit=centred, whitens=True),
        Algorithm(name="maxrl", credit=relative_to_mean),
        Algorithm(name="gspo", credit=standardised, loss="silva.train.losses.gspo:gspo", options=DUAL_CLIP | STD),
        Algorithm(name="cispo", credit=standardised, loss="silva.train.losses.cispo:cispo", options=CLIP | STD),
        Algorithm(name="sapo", credit=standardised, loss="silva.train.losses.sapo:sapo", options=STD),
        Algorithm(
            name="ppo",
            credit=reward_itself,
            advantages="gae",
            compares=False,
            options=DUAL_CLIP | RETURNS | CRITIC,
        ),
    )
}

SPECIAL_OPTIONS: frozenset[str] = frozenset().union(*(row.options for row in ALGORITHMS.values()))
"""Options that only some algorithms use."""


def credit_function(algorithm: Algorithm, *, std_normalization: bool = True) -> CreditFunction:
    """The credit of an algorithm, without the division by the spread where that is switched off."""
    return algorithm.credit if std_normalization or algorithm.credit is not standardised else centred
