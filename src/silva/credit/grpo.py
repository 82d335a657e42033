"""GRPO: how many standard deviations a session did better than the mean of its group.

Shao et al. 2024, "DeepSeekMath", outcome supervision. Without the division it is `centred`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from silva.credit.spread import centred, has_no_spread

STD_EPSILON = 1e-6


def standardised(rewards_G: Sequence[float]) -> list[float]:
    """`(r - mean) / (std + 1e-6)` with the unbiased std; exactly 0.0 for all where `has_no_spread`."""
    centred_G = centred(rewards_G)
    if has_no_spread(rewards_G):
        return centred_G
    std = math.sqrt(math.fsum(c * c for c in centred_G) / (len(centred_G) - 1))
    return [c / (std + STD_EPSILON) for c in centred_G]
