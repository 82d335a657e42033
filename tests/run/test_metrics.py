"""Numbers of a rollout step, whatever agents report."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
from contexts import context
from hypothesis import given
from hypothesis import strategies as st

from silva.run.metrics import staleness_metrics
from silva.types.numbers import spread
from silva.types.rollout import TrainingSample

NUMBERS = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=9)


@given(NUMBERS)
def test_the_spread_of_any_finite_numbers_is_finite_and_in_order(values: list[float]) -> None:
    found = spread("x", values)
    low, high = found["x/min"], found["x/max"]
    assert (low, high) == (min(values), max(values))
    for name in ("mean", "median"):
        assert math.isfinite(found[f"x/{name}"])
        slack = 1e-9 * max(abs(low), abs(high)) + 1e-300
        assert low - slack <= found[f"x/{name}"] <= high + slack


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=9))
def test_mean_and_median_are_those_of_the_library(values: list[int]) -> None:
    found = spread("x", [float(value) for value in values])
    assert found["x/mean"] == pytest.approx(statistics.fmean(values))
    assert found["x/median"] == statistics.median(values)


def test_staleness_counts_a_session_once_by_its_oldest_weights() -> None:
    def aged(session: str, name: str, version: int) -> TrainingSample:
        sample = context(session, name, [(2, 1)])
        spans = tuple(replace(span, version=version if span.version >= 0 else -1) for span in sample.version_spans)
        return replace(sample, version_spans=spans)

    samples = [aged("g-0", "a", 4), aged("g-1", "a", 5), aged("g-0", "b", 2), aged("g-0", "c", 5)]
    assert staleness_metrics(samples, version=6) == {"staleness/mean": (4 + 1) / 2, "staleness/max": 4}
    assert staleness_metrics([], version=6) == {}
