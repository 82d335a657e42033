"""MaxRL: the distance from the group's mean, in units of that mean, so that rare successes weigh more.

Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from silva.credit.spread import centred, has_no_spread


def relative_to_mean(rewards_G: Sequence[float]) -> list[float]:
    """`(r - mean) / mean` where the mean is above 0, else 0.0; exactly 0.0 for all without a spread.

    A mean that is no more than the rounding of its rewards counts as 0.
    """
    if has_no_spread(rewards_G):
        return [0.0] * len(rewards_G)
    mean = math.fsum(rewards_G) / len(rewards_G)
    if mean <= 4 * math.ulp(max(map(abs, rewards_G))):
        return [0.0] * len(rewards_G)
    return [c / mean for c in centred(rewards_G)]
