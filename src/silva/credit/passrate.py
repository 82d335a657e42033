"""The pass rate: how likely one of k answers to a prompt is right.

The unbiased estimator of Chen et al. 2021 ("Evaluating Large Language Models Trained on Code"), over the n sessions
that a prompt has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRate:
    """pass@k, averaged over the `num_groups` groups that have k sessions; `value` is None where none has."""

    k: int
    """Sessions of which one has to pass."""
    value: float | None
    """The mean over the groups; None where no group has k sessions."""
    num_groups: int
    """Groups that have k sessions."""


def pass_at_k(num_sessions: int, num_passed: int, k: int) -> float:
    """The share of all choices of `k` of the sessions that hold at least one that passed."""
    assert 0 <= num_passed <= num_sessions and 1 <= k <= num_sessions, (num_sessions, num_passed, k)
    return 1.0 - math.comb(num_sessions - num_passed, k) / math.comb(num_sessions, k)


def pass_rates(groups: Sequence[tuple[int, int]], *, group_size: int) -> list[PassRate]:
    """pass@k of groups, each as (sessions, passed), for k = 1, 2, 4, ... below `group_size`, and for `group_size`."""
    sizes = [1 << power for power in range(group_size.bit_length()) if 1 << power < group_size] + [group_size]
    rates: list[PassRate] = []
    for k in sizes:
        values = [pass_at_k(n, passed, k) for n, passed in groups if n >= k]
        mean = math.fsum(values) / len(values) if values else None
        rates.append(PassRate(k=k, value=mean, num_groups=len(values)))
    return rates
