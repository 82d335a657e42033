"""The credit functions against their formulas, computed exactly in fractions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.credit.grpo import standardised
from silva.credit.maxrl import relative_to_mean
from silva.credit.reward import MAX_ABS_REWARD
from silva.credit.rloo import leave_one_out
from silva.credit.spread import CreditFunction, centred, has_no_spread, reward_itself

COMPARING: tuple[CreditFunction, ...] = (standardised, centred, leave_one_out, relative_to_mean)
compares = pytest.mark.parametrize("credit_of", COMPARING)
usual = st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0, -1.0, 0.1 + 0.2, 0.3])
"""Rewards as tasks give them, often equal."""
possible = (
    st.floats(-MAX_ABS_REWARD, MAX_ABS_REWARD) | st.floats(-1e-300, 1e-300) | st.sampled_from([1e30, 5e-324, 0.0])
)
"""All that passes the border, down to subnormal numbers."""


def grpo(r: Fraction, others: Sequence[Fraction]) -> float:
    rewards = [r, *others]
    mean = sum(rewards) / len(rewards)
    variance = sum((x - mean) ** 2 for x in rewards) / (len(rewards) - 1)
    return float(r - mean) / (math.sqrt(variance) + 1e-6)


def maxrl(r: Fraction, others: Sequence[Fraction]) -> float:
    mean = (r + sum(others)) / (len(others) + 1)
    return float((r - mean) / mean) if mean > 0 else 0.0


DEFINED: dict[CreditFunction, Callable[[Fraction, Sequence[Fraction]], float]] = {
    standardised: grpo,
    centred: lambda r, others: float(r - (r + sum(others)) / (len(others) + 1)),
    leave_one_out: lambda r, others: float(r - sum(others) / len(others)),
    relative_to_mean: maxrl,
}


@given(st.lists(usual, min_size=2, max_size=8))
def test_credit_equals_the_textbook_formula(rewards: list[float]) -> None:
    exact = [Fraction(reward) for reward in rewards]
    rounding = 4 * math.ulp(max(map(abs, rewards)))  # of a mean, and so of each distance from it
    mean = float(sum(exact) / len(exact))
    # what a distance is divided by, which can magnify its rounding
    divisor = {standardised: 1e-6, relative_to_mean: abs(mean) or 1.0}
    for credit_of, defined in DEFINED.items():
        if has_no_spread(rewards) or (credit_of is relative_to_mean and abs(mean) <= 2 * rounding):
            continue
        expected = [defined(r, exact[:i] + exact[i + 1 :]) for i, r in enumerate(exact)]
        tolerance = rounding / min(divisor.get(credit_of, 1.0), 1.0)
        assert credit_of(rewards) == pytest.approx(expected, rel=1e-9, abs=tolerance), credit_of.__name__
    assert reward_itself(rewards) == rewards


@given(st.lists(possible, min_size=1, max_size=8), st.data())
def test_credit_is_finite_bounded_and_knows_no_order(rewards: list[float], data: st.DataObject) -> None:
    num, largest = len(rewards), max(map(abs, rewards))
    order = data.draw(st.permutations(range(num)))
    bound = {
        standardised: math.sqrt(num),
        centred: 2 * largest,
        leave_one_out: 2 * largest * (1 + 1 / max(1, num - 1)),
        # in units of a mean that may be small; no more than num - 1 where no reward is negative
        relative_to_mean: num - 1 if min(rewards) >= 0 else 2.0**52,
        reward_itself: largest,
    }
    for credit_of, most in bound.items():
        credit = credit_of(rewards)
        assert all(map(math.isfinite, credit)) and max(map(abs, credit)) <= most * (1 + 1e-9), credit_of.__name__
        assert credit_of([rewards[i] for i in order]) == [credit[i] for i in order]
        assert credit_of is reward_itself or abs(math.fsum(credit)) <= 1e-9 * num * max(most, 1.0)


@given(possible, st.integers(1, 9))
def test_without_a_spread_credit_is_exactly_zero(reward: float, size: int) -> None:
    for credit_of in COMPARING:
        assert credit_of([reward] * size) == [0.0] * size
    assert reward_itself([reward] * size) == [reward] * size


@compares
@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3, 0.3], [3e-1 + 6e-1, 0.9], [1e30, math.nextafter(1e30, 0)], [7.0]])
def test_rewards_equal_up_to_rounding_are_equal(credit_of: CreditFunction, rewards: list[float]) -> None:
    assert credit_of(rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize(
    ("credit_of", "rewards", "expected"),
    [
        # mean 0.5, unbiased std sqrt(1/3)
        (standardised, [1, 0, 1, 0], [0.5 / ((1 / 3) ** 0.5 + 1e-6) * sign for sign in (1, -1, 1, -1)]),
        (centred, [1, 0, 1, 0], [0.5, -0.5, 0.5, -0.5]),
        (leave_one_out, [1, 0, 0], [1.0, -0.5, -0.5]),
        # one success among four weighs three times as much as each of three successes
        (relative_to_mean, [1, 0, 0, 0], [3.0, -1.0, -1.0, -1.0]),
        (relative_to_mean, [1, 1, 1, 0], [1 / 3, 1 / 3, 1 / 3, -1.0]),
        (relative_to_mean, [-1, 0, -2], [0.0, 0.0, 0.0]),
        (relative_to_mean, [1, -1, 0], [0.0, 0.0, 0.0]),
        (relative_to_mean, [0.1, 0.2, -0.3], [0.0, 0.0, 0.0]),  # its float64 mean is 1e-17: rounding alone
        (reward_itself, [3, -2], [3.0, -2.0]),
    ],
)
def test_known_values(credit_of: CreditFunction, rewards: list[float], expected: list[float]) -> None:
    assert credit_of(rewards) == pytest.approx(expected, abs=1e-12)
