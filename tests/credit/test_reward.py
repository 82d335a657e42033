from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from silva.credit.reward import MAX_ABS_REWARD, check_reward
from silva.types.errors import SessionFailure


@pytest.mark.parametrize(
    "value", [0, 1, -3, 0.25, np.float32(0.5), np.float64(0.1), np.int64(7), np.float16(2), Fraction(1, 4)]
)
def test_numbers_become_floats(value: object) -> None:
    reward = check_reward(value, "session s1")
    assert type(reward) is float
    assert reward == float(value)  # type: ignore[arg-type]


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


NOT_FINITE = [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("inf")]
NOT_NUMBERS = [None, "1.0", "nan", "x" * 10_000, {"reward": 1}, [1.0] * 1000, 1j, np.array(1.0), Unprintable()]
TOO_LARGE = [10**400, 10**5000, 2 * MAX_ABS_REWARD, -2 * MAX_ABS_REWARD]


@pytest.mark.parametrize("value", [*NOT_FINITE, *NOT_NUMBERS, *TOO_LARGE], ids=lambda value: type(value).__name__)
def test_everything_else_fails_its_session_by_name(value: object) -> None:
    with pytest.raises(SessionFailure, match="session s1, context main") as caught:
        check_reward(value, "session s1, context main")
    assert caught.value.reason == "reward_invalid"
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [True, False, np.bool_(True)])
def test_bools_count_only_where_a_reward_function_made_them(value: object) -> None:
    assert check_reward(value, "session s1", allow_bool=True) == float(bool(value))
    with pytest.raises(SessionFailure, match="bool"):
        check_reward(value, "session s1")
