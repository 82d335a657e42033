"""Responses of samples that tests make by hand."""

from __future__ import annotations

from collections.abc import Sequence

from silva.types.rollout import ResponseSpan


def responses_of(mask: Sequence[int]) -> tuple[ResponseSpan, ...]:
    """One response for each run of ones, numbered as nodes 2, 4, 6, ..."""
    runs: list[list[int]] = []
    for at, bit in enumerate(mask):
        if bit and runs and sum(runs[-1]) == at:
            runs[-1][1] += 1
        elif bit:
            runs.append([at, 1])
    return tuple(ResponseSpan(node_id=2 + 2 * i, start=a, length=n) for i, (a, n) in enumerate(runs))
