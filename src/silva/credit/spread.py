"""When the rewards of a group distinguish its sessions, and how far each is from their mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

CreditFunction = Callable[[Sequence[float]], list[float]]
"""From the rewards of a group's sessions (`_G`, each through `check_reward`) to the credit of each, in float64."""


def has_no_spread(rewards_G: Sequence[float]) -> bool:
    """True for a group of one, and where all rewards are equal up to the rounding of a few float64 operations."""
    if len(rewards_G) < 2:
        return True
    low, high = min(rewards_G), max(rewards_G)
    # 0.1 + 0.2 and 0.3 are the same reward: without this, their difference of one ulp would be divided by itself
    return high - low <= 4 * math.ulp(max(abs(low), abs(high)))


def centred(rewards_G: Sequence[float]) -> list[float]:
    """`r - mean`; exactly 0.0 for all where `has_no_spread`.

    Alone it is the credit of REINFORCE++-baseline (Hu et al. 2025) and of Dr. GRPO (Liu et al. 2025).
    """
    if has_no_spread(rewards_G):
        return [0.0] * len(rewards_G)
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]


def reward_itself(rewards_G: Sequence[float]) -> list[float]:
    """The rewards as they are, for estimators that find their baseline elsewhere."""
    return [float(reward) for reward in rewards_G]
