"""Which samples share a row, and which rank takes which row when: the plan of a global batch under a token budget.

A row may hold any number of samples up to its budget of tokens. Ranks that train together wait for each other after
every row, so all ranks get the same number of rows, and the k-th rows of all ranks are to cost alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

import numpy as np
from numpy.typing import NDArray

Bin = list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCost:
    """Cost of a row in any unit: the sum of `linear * L + quadratic * L**2` over the lengths L of its samples.

    The square is that of each sample and not of the row, since packed attention runs through each sample alone. The
    default counts multiplications of a dense decoder as 12 * width * L + L**2 a layer, for a width of 2048: the
    projections of a block hold about 12 * width**2 weights, and causal attention meets half of L**2 pairs, twice.
    """

    linear: float = 24576.0
    """Cost per token."""
    quadratic: float = 1.0
    """Cost per squared token of a sample."""

    def of_samples(self, lengths: Sequence[int]) -> NDArray[np.float64]:
        """The share of each sample: [N]."""
        lengths_N = np.asarray(lengths, dtype=np.float64)
        return (self.linear + self.quadratic * lengths_N) * lengths_N


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Which samples share a row, and which rank computes it. All ranks have the same number of rows.

    Example: lengths 5, 3, 2 under 6 tokens give `Plan(ranks=(((0,), (1, 2)),), too_long=())`
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """`ranks[r][k]`: the samples (indices, ascending) of row k of rank r; empty only with fewer samples than rows."""
    too_long: tuple[int, ...]
    """Samples that fit in no row."""

    @property
    def num_rows(self) -> int:
        """Rows of each rank."""
        return len(self.ranks[0])


def plan(lengths: Sequence[int], max_tokens: int, *, num_ranks: int = 1, cost: RowCost | None = None) -> Plan:
    """Rows of at most `max_tokens` tokens for samples of these lengths (tokens, at least 1), costliest rows first.

    First-fit-decreasing gives the rows; the costliest are split until every rank gets as many; neighbours in the order
    of cost run at the same time. Where there is room, samples are dealt out anew so that these cost alike. How rows are
    filled depends on the lengths alone, not on their order.
    """
    if max_tokens < 1 or num_ranks < 1:
        raise ValueError(f"a plan needs a budget and a rank: {max_tokens} tokens, {num_ranks} ranks")
    if any(length < 1 for length in lengths):
        raise ValueError(f"sample {next(i for i, length in enumerate(lengths) if length < 1)} has no token")
    costs = [float(share) for share in (cost or RowCost()).of_samples(lengths)]
    too_long = tuple(i for i, length in enumerate(lengths) if length > max_tokens)
    bins = _first_fit_decreasing(lengths, max_tokens)
    _split_costliest(bins, costs, -len(bins) % num_ranks)
    bins = _level(bins, lengths, costs, max_tokens, num_ranks)
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    spent = [0.0] * num_ranks
    for at in range(0, len(bins), num_ranks):
        together = _level(bins[at : at + num_ranks], lengths, costs, max_tokens, num_ranks)
        # ranks that meet only at the end of the step are served too: who has done least so far takes the costliest
        for rank, row in zip(sorted(range(num_ranks), key=spent.__getitem__), together, strict=True):
            ranks[rank].append(tuple(sorted(row)))
            spent[rank] += _load(row, costs)
    return Plan(ranks=tuple(tuple(rows) for rows in ranks), too_long=too_long)


def _first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[Bin]:
    """Bins of samples that fit, longest first.

    One bin after the other takes the longest sample left that fits. That is first-fit-decreasing seen from the bins:
    the first bin gets what it would get, and the rest meets the other bins as if the first were not there.
    """
    # Ascending, equal lengths in descending order of index: taken from the end, the first of equals goes first.
    left = sorted((i for i, length in enumerate(lengths) if length <= max_tokens), key=lambda i: (lengths[i], -i))
    sizes = [lengths[i] for i in left]
    bins: list[Bin] = []
    while left:
        room = max_tokens
        taken: Bin = []
        while (at := bisect_right(sizes, room) - 1) >= 0:
            room -= sizes.pop(at)
            taken.append(left.pop(at))
        bins.append(taken)
    return bins


def _split_costliest(bins: list[Bin], costs: Sequence[float], num_more: int) -> None:
    """Add `num_more` bins by halving the costliest bin that can be halved; empty bins where none can."""
    for _ in range(num_more):
        divisible = [k for k, samples in enumerate(bins) if len(samples) > 1]
        if not divisible:
            bins.append([])
            continue
        k = max(divisible, key=lambda k: _load(bins[k], costs))
        bins[k : k + 1] = _deal(bins[k], 2, costs)


def _level(
    bins: Sequence[Bin], lengths: Sequence[int], costs: Sequence[float], max_tokens: int, num_ranks: int
) -> list[Bin]:
    """The bins, costliest first, their samples dealt out anew where all still fit and ranks wait less."""
    pooled = sorted((i for samples in bins for i in samples), key=lambda i: (-lengths[i], i))
    dealt = _deal(pooled, len(bins), costs)
    fits = all(sum(lengths[i] for i in samples) <= max_tokens for samples in dealt)
    best = min([bins, dealt] if fits else [bins], key=lambda bins: _wait(bins, costs, num_ranks))
    return sorted(best, key=lambda samples: -_load(samples, costs))


def _wait(bins: Sequence[Bin], costs: Sequence[float], num_ranks: int) -> float:
    """Cost of running all bins, neighbours in the order of cost at the same time."""
    return sum(sorted((_load(samples, costs) for samples in bins), reverse=True)[::num_ranks])


def _deal(samples: Sequence[int], num: int, costs: Sequence[float]) -> list[Bin]:
    """`num` bins of like cost: each sample, longest first, to the cheapest bin."""
    bins: list[Bin] = [[] for _ in range(num)]
    cheapest = [(0.0, k) for k in range(num)]
    for i in samples:
        load, k = cheapest[0]
        bins[k].append(i)
        heapreplace(cheapest, (load + costs[i], k))
    return bins


def _load(samples: Sequence[int], costs: Sequence[float]) -> float:
    return sum(costs[i] for i in samples)
