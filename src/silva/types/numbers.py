"""Statistics of a few numbers, for metrics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def spread(prefix: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, median, largest and smallest of some numbers."""
    middle = statistics.median_low(values) / 2 + statistics.median_high(values) / 2
    return {
        f"{prefix}/mean": mean(values),
        f"{prefix}/median": middle,
        f"{prefix}/max": max(values),
        f"{prefix}/min": min(values),
    }


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; finite whenever the values are."""
    # Divided before they are added: the sum of large numbers that agents report may be no float any more.
    return math.fsum(value / len(values) for value in values)
