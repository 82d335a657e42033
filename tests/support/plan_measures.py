"""How good a plan of packed rows is: for its tests and its bench."""

from __future__ import annotations

from collections.abc import Sequence

from silva.train.balance import Plan, RowCost


def fill(planned: Plan, lengths: Sequence[int], max_tokens: int) -> float:
    """Tokens in all rows over the tokens that these rows could hold; 1.0 where there is no row."""
    rows = [row for rank in planned.ranks for row in rank]
    return sum(lengths[i] for row in rows for i in row) / (len(rows) * max_tokens) if rows else 1.0


def lockstep_ratio(planned: Plan, lengths: Sequence[int], cost: RowCost | None = None) -> float:
    """Cost of waiting for the costliest rank at every row, over the cost if all ranks shared evenly; at least 1.0."""
    shares_N = (cost or RowCost()).of_samples(lengths)
    loads = [[float(shares_N[list(row)].sum()) for row in rank] for rank in planned.ranks]
    total = sum(map(sum, loads))
    return sum(max(together) for together in zip(*loads, strict=True)) * len(loads) / total if total else 1.0
