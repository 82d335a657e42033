from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from silva.credit.reward import MAX_ABS_REWARD, Reward, check_reward, read_reward
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


def test_a_reward_is_a_number_or_an_object_with_one_that_counts() -> None:
    assert read_reward(None, "s") == read_reward(None, "s", "score") == Reward(value=None)
    assert read_reward(2, "s") == read_reward(2, "s", "score") == Reward(value=2.0)
    value = {
        "score": 1,
        "len": np.int64(3),
        "ok": True,
        "np": np.bool_(False),
        "text": "x",
        "none": None,
        "l": [1],
        5: 6,
    }
    assert read_reward(value, "s", "score") == Reward(value=1.0, helpers={"len": 3.0, "ok": 1.0, "np": 0.0})
    assert read_reward({"score": True}, "s", "score", allow_bool=True) == Reward(value=1.0)


@pytest.mark.parametrize(
    ("value", "key", "text"),
    [
        ({"score": 1}, None, "an object needs --reward-key"),
        ({"score": 1}, "other", "it has no entry 'other' (--reward-key)"),
        *(({"score": bad}, "score", "entry 'score' (--reward-key) is") for bad in (None, "1", math.nan, [1], True, {})),
        *(
            ({"score": 1, "n": bad}, "score", "entry 'n' is")
            for bad in (math.nan, math.inf, 10**400, np.float32("nan"))
        ),
        ({"score": 1, "n" * 10_000: math.nan}, "score", "it must be finite"),
        ([1], "score", "it must be a number"),
        (True, "score", "a bool is taken only from a reward function"),
        ({str(n): "x" * 100 for n in range(10_000)}, None, "--reward-key"),
    ],
    ids=range(16),
)
def test_rewards_that_fail_their_session_by_name(value: object, key: str | None, text: str) -> None:
    with pytest.raises(SessionFailure, match="session s1, record 'main'") as caught:
        read_reward(value, "session s1, record 'main'", key)
    assert caught.value.reason == "reward_invalid"
    assert text in str(caught.value) and len(str(caught.value)) < 600
