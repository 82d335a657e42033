"""The border that a custom advantage function's result crosses."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contexts import GROUP, context

from silva.credit.hook import hook_input, read_credits
from silva.judge.custom_advantage import CustomAdvantage
from silva.types.errors import GroupEnd, SilvaError
from silva.types.rollout import TrainingSample

TWO, ONE = [(2, 3), (4, 1)], [(2, 3)]


def group() -> tuple[TrainingSample, ...]:
    """Two sessions in the order of their slots; the second exported one context without a name."""
    return (
        context("g-7", "main", TWO, metadata={"outcome": 1.0, "log": {"steps": [1, 2]}}, reward=1.0),
        context("g-7", "searcher_0", ONE, metadata={"usefulness": 0.6}, trained=set()),
        context("g-3", None, TWO, metadata={}),
    )


def good(**changed: Any) -> list[dict[str | None, Any]]:
    return [{"main": 1.0, "searcher_0": 0.5, **changed}, {None: -1.0}]


def test_the_function_sees_names_and_metadata_in_the_order_of_the_slots_and_nothing_of_ours() -> None:
    samples = group()
    before = copy.deepcopy(samples)
    given = hook_input(samples)
    assert given == [
        {"main": {"outcome": 1.0, "log": {"steps": [1, 2]}}, "searcher_0": {"usefulness": 0.6}},
        {None: {}},
    ]
    given[0]["main"]["log"]["steps"].clear()
    given[1][None]["new"] = 1
    given.pop()
    assert samples == before


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2, 2.0),
        (0.0, 0.0),
        (np.float32(0.5), 0.5),
        (np.int64(-3), -3.0),
        (np.array(0.25), 0.25),
        (True, 1.0),
        (np.bool_(False), 0.0),
        ([1, 0.5], (1.0, 0.5)),
        ((True, np.float32(2)), (1.0, 2.0)),
        (np.array([0.5, -1.0], dtype=np.float32), (0.5, -1.0)),
    ],
)
def test_numbers_and_lists_of_one_number_a_response_are_taken_as_they_are(value: object, expected: object) -> None:
    (credit, *others) = read_credits(good(main=value), group())
    assert credit == expected and type(credit) is type(expected) and others == [0.5, -1.0]


BAD_MAIN = [
    *(math.nan, math.inf, -math.inf, np.float32("nan"), 10**400, 2e30, None, "1.0", "x" * 9999, {"a": 1}, 1j, b"1"),
    *([], [1.0], [1.0, 2.0, 3.0], [1.0, math.nan], [1.0, None], [[1.0, 2.0]], np.ones((2, 2)), np.ones(3), "ab"),
]


@pytest.mark.parametrize("value", BAD_MAIN, ids=lambda value: repr(value)[:20])
def test_what_is_no_credit_drops_the_group_and_names_session_and_context(value: object) -> None:
    with pytest.raises(GroupEnd, match=r"session g-7 \(item 0\), context 'main'") as caught:
        read_credits(good(main=value), group())
    assert (caught.value.reason, caught.value.state) == ("custom_advantage_invalid", "dropped")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({}, r"\{\} \(dict\); it must be a list .* 2 sessions"),
        (1.0, r"1\.0 \(float\); it must be a list"),
        ("ab", r"it must be a list"),
        ([], "a list of 0 for 2 sessions"),
        (good()[:1], "a list of 1 for 2 sessions"),
        ([*good(), {}], "a list of 3 for 2 sessions"),
        (
            [1.0, {None: 1.0}],
            r"1\.0 \(float\) for session g-7 \(item 0\); it must be a dict with .*'main', 'searcher_0'",
        ),
        (good()[::-1], r"no credit for session g-7 \(item 0\), context 'main'.* It gave: None"),
        ([{"main": 1.0}, {None: 1.0}], r"no credit for session g-7 \(item 0\), context 'searcher_0'"),
        (good(other=3.5), r"a credit \(3\.5 \(float\)\) for session g-7 \(item 0\), context 'other', which .* not"),
        ([good()[0], {}], r"session g-3 \(item 1\), context None; .* It gave: nothing"),
        ([good()[0], {"None": 1.0}], r"session g-3 \(item 1\), context None"),
        (good(main=[1.0]), r"1 value\(s\), but the context has 2 response\(s\)"),
    ],
)
def test_a_result_of_another_shape_is_told_with_what_is_expected(value: object, told: str) -> None:
    with pytest.raises(GroupEnd, match=told) as caught:
        read_credits(value, group())
    assert (caught.value.reason, caught.value.state) == ("custom_advantage_invalid", "dropped")


async def test_credits_reach_their_contexts_and_the_turn_that_two_of_them_hold() -> None:
    async def advantage(metadata_by_slot: list[dict[str | None, dict[str, Any]]]) -> object:
        usefulness = metadata_by_slot[0]["searcher_0"]["usefulness"]
        return ({"searcher_0": usefulness, "main": [1.0, 3.0]}, {None: 0})

    main, searcher, alone = await CustomAdvantage(advantage, failed=SilvaError).assign(group(), GROUP)
    assert (main.credit, main.response_credits) == (1.5, (0.8, 3.0))
    assert (searcher.credit, searcher.response_credits, searcher.num_trainable) == (0.6, (0.8,), 0)
    assert (alone.credit, alone.response_credits) == (0.0, None)
    each = CustomAdvantage(advantage, failed=SilvaError, shared_prefix="each")
    main, searcher, alone = await each.assign(group(), GROUP)
    assert (main.response_credits, searcher.response_credits) == ((1.0, 3.0), None)


class _GaveNothing(SilvaError):
    pass


async def test_none_filters_the_group_and_an_error_of_the_function_drops_it() -> None:
    async def none(_: object) -> None:
        return None

    async def fails(_: object) -> None:
        raise _GaveNothing("my.credit raised KeyError: 'outcome'")

    with pytest.raises(GroupEnd) as caught:
        await CustomAdvantage(none, failed=_GaveNothing).assign(group(), GROUP)
    assert (caught.value.reason, caught.value.state) == ("custom_advantage_none", "filtered")
    with pytest.raises(GroupEnd, match=r"^my\.credit: the custom advantage function returned None") as caught:
        await CustomAdvantage(none, failed=_GaveNothing, path="my.credit").assign(group(), GROUP)
    assert (caught.value.reason, caught.value.state) == ("custom_advantage_none", "filtered")
    with pytest.raises(GroupEnd, match=r"my\.credit raised KeyError") as caught:
        await CustomAdvantage(fails, failed=_GaveNothing).assign(group(), GROUP)
    assert (caught.value.reason, caught.value.state) == ("custom_advantage_failed", "dropped")


def test_the_function_of_the_docs_does_what_they_say() -> None:
    text = (Path(__file__).parents[2] / "docs" / "credit.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    module: dict[str, Any] = {}
    exec(code, module)
    samples = [
        context("g-0", "main", TWO, metadata={"right": True}),
        context("g-0", "searcher_0", ONE, metadata={"useful": 0.6}),
        context("g-1", "main", TWO, metadata={"right": False}),
    ]
    assert read_credits(module["advantage_func"](hook_input(samples)), samples) == [0.5, 0.3, -0.5]
    with pytest.raises(GroupEnd) as caught:
        read_credits(module["advantage_func"](hook_input(samples[:2])), samples[:2])
    assert caught.value.state == "filtered"
