from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from plan_measures import fill, lockstep_ratio

from silva.train.balance import Plan, RowCost, plan

SQUARE = RowCost(linear=0.0, quadratic=1.0)
lengths_st = st.lists(st.integers(1, 120), max_size=200)


def loads(planned: Plan, lengths: list[int]) -> list[list[int]]:
    return [sorted(sum(lengths[i] for i in row) for row in rank) for rank in planned.ranks]


@given(lengths_st, st.integers(1, 8), st.integers(60, 300), st.sampled_from([RowCost(), SQUARE]))
@example([10, 7, 6, 1], 2, 13, SQUARE)  # even shares of the cost would not fit
def test_each_sample_is_in_one_row_within_the_budget_and_all_ranks_have_as_many(
    lengths: list[int], num_ranks: int, max_tokens: int, cost: RowCost
) -> None:
    planned = plan(lengths, max_tokens, num_ranks=num_ranks, cost=cost)
    assert planned == plan(lengths, max_tokens, num_ranks=num_ranks, cost=cost)
    rows = [row for rank in planned.ranks for row in rank]
    assert sorted([i for row in rows for i in row] + list(planned.too_long)) == list(range(len(lengths)))
    assert list(planned.too_long) == [i for i, length in enumerate(lengths) if length > max_tokens]
    assert all(sum(lengths[i] for i in row) <= max_tokens for row in rows)
    assert len(planned.ranks) == num_ranks and {len(rank) for rank in planned.ranks} == {planned.num_rows}
    if not all(rows):  # rows stay empty only where no other row could give one of its samples away
        assert len(lengths) - len(planned.too_long) < len(rows)
        assert all(len(row) <= 1 for row in rows)
    assert lockstep_ratio(planned, lengths, cost) >= 1 - 1e-12


@given(st.integers(0, 10_000), lengths_st, st.integers(1, 8))
def test_how_rows_are_filled_does_not_depend_on_the_order_of_the_samples(
    seed: int, lengths: list[int], num_ranks: int
) -> None:
    order = np.random.default_rng(seed).permutation(len(lengths))
    shuffled = [lengths[i] for i in order]
    mine, other = (plan(values, 150, num_ranks=num_ranks) for values in (lengths, shuffled))
    assert loads(mine, lengths) == loads(other, shuffled)


@given(lengths_st, st.integers(60, 300))
def test_rows_of_one_rank_are_those_of_first_fit_decreasing(lengths: list[int], max_tokens: int) -> None:
    rooms: list[int] = []
    for length in sorted((length for length in lengths if length <= max_tokens), reverse=True):
        at = next((k for k, room in enumerate(rooms) if room >= length), len(rooms))
        rooms[at:] = rooms[at:] or [max_tokens]
        rooms[at] -= length
    assert loads(plan(lengths, max_tokens), lengths)[0] == sorted(max_tokens - room for room in rooms)


def test_too_few_samples_for_all_ranks_leave_rows_empty() -> None:
    assert plan([5, 9], 10, num_ranks=3).ranks == (((1,),), ((0,),), ((),))
    assert plan([9] * 3, 10, num_ranks=2).ranks == (((0,), (2,)), ((1,), ()))
    assert plan([4, 4], 10, num_ranks=2).ranks == (((0,),), ((1,),))
    assert plan([], 10, num_ranks=2) == Plan(ranks=((), ()), too_long=())
    assert plan([11], 10) == Plan(ranks=((),), too_long=(0,))


def test_the_costliest_rows_are_split_and_like_rows_run_at_the_same_time() -> None:
    # three full rows: a fourth is needed, and of those that can be split the one of 60 and 40 costs most
    cost = RowCost(linear=1.0, quadratic=1.0)
    planned = plan([100, 50, 50, 60, 40], 100, num_ranks=2, cost=cost)
    assert planned.ranks == (((0,), (4,)), ((1, 2), (3,)))
    # 10100 beside 5100, then 3660 beside 1640; an even share of the 20500 would be 10250
    assert lockstep_ratio(planned, [100, 50, 50, 60, 40], cost) == pytest.approx((10100 + 3660) / 10250)
    assert fill(planned, [100, 50, 50, 60, 40], 100) == 0.75
    # first fit alone would put 60 and 40 beside 50
    assert plan([60, 40, 50], 100, num_ranks=2, cost=cost).ranks == (((1, 2),), ((0,),))


def test_4096_log_normal_lengths_fill_their_rows_and_keep_ranks_in_step() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(8.0, 1.0, 4096).astype(int) + 1, 65536).tolist()
    planned = plan(lengths, 65536, num_ranks=8)
    assert fill(planned, lengths, 65536) >= 0.97
    assert lockstep_ratio(planned, lengths) <= 1.05


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "num_ranks", "part"),
    [([1, 0], 5, 1, "sample 1 has no token"), ([1], 0, 1, "0 tokens"), ([1], 5, 0, "0 ranks")],
)
def test_what_cannot_be_planned_is_refused(lengths: list[int], max_tokens: int, num_ranks: int, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        plan(lengths, max_tokens, num_ranks=num_ranks)
