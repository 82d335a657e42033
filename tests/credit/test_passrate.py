"""pass@k beside the count of all choices."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.credit.passrate import pass_at_k, pass_rates


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_it_is_the_share_of_choices_that_hold_a_success(passed: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(passed)))
    choices = [any(choice) for choice in combinations(passed, k)]
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(sum(choices) / len(choices))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6), st.integers(1, 9))
def test_rates_rise_with_k_and_count_the_groups_that_are_large_enough(
    drawn: list[tuple[int, int]], group_size: int
) -> None:
    groups = [(max(pair), min(pair)) for pair in drawn]
    rates = pass_rates(groups, group_size=group_size)
    sizes = [rate.k for rate in rates]
    assert sizes[0] == 1 and sizes[-1] == group_size and sizes == sorted(set(sizes))
    assert all(k & (k - 1) == 0 for k in sizes[:-1])
    for rate in rates:
        assert rate.num_groups == sum(n >= rate.k for n, _ in groups)
        assert (rate.value is None) == (rate.num_groups == 0)
    if {n for n, _ in groups} == {group_size}:
        values = [rate.value for rate in rates]
        assert values == sorted(values)


def test_large_groups_keep_their_precision() -> None:
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)
