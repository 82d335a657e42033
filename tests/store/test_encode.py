"""What goes into a column comes out of it."""

from __future__ import annotations

import itertools
import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.store.encode import pack_floats, pack_ids, runs_of, to_column, to_json, unpack_floats, unpack_ids


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ids_round_trip(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_floats_round_trip_as_float32(values: list[float]) -> None:
    back = unpack_floats(pack_floats(values))
    assert [struct.pack("<f", value) for value in back] == [struct.pack("<f", value) for value in values]


@given(st.integers(0, 10**6))
def test_short_decimals_come_back_as_written(thousands: int) -> None:
    assert unpack_floats(pack_floats([-thousands / 1000])) == [-thousands / 1000]


def test_floats_stay_finite() -> None:
    assert all(math.isfinite(value) for value in unpack_floats(pack_floats([-1e300, -0.5, 1e39])))
    with pytest.raises(AssertionError):
        pack_floats([float("nan")])


@given(st.lists(st.booleans()))
def test_runs_say_where_the_flags_are(flags: list[bool]) -> None:
    marked = [False] * len(flags)
    runs = runs_of(flags)
    for start, length in runs:
        marked[start : start + length] = [True] * length
    assert marked == flags
    assert all(left[0] + left[1] < right[0] for left, right in itertools.pairwise(runs))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec=None)), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_any_json_value_keeps_its_value(value: object) -> None:
    text = to_column(value)
    text.encode("utf-8")
    assert repr(json.loads(text)) == repr(value)


@given(JSON)
def test_shown_json_is_strict(value: object) -> None:
    text = to_json({"value": value})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(text, parse_constant=refuse)
    assert text.isascii()


def test_numbers_of_other_libraries_stay_numbers() -> None:
    value = {"int": np.int64(3), "flag": np.bool_(True), "list": np.arange(3), "float": np.float32(0.5)}
    wanted = {"int": 3, "flag": True, "list": [0, 1, 2], "float": 0.5}
    assert json.loads(to_column(value)) == wanted
    assert json.loads(to_column({**value, (1,): 2})) == {**wanted, "(1,)": 2}


def test_what_json_cannot_hold_is_kept_as_text() -> None:
    circle: list[object] = [1]
    circle.append({"again": circle, "more": circle})
    deep: object = "end"
    for _ in range(5000):
        deep = [deep]
    deep_enough_to_dump: object = "end"
    for _ in range(400):
        deep_enough_to_dump = {"a": deep_enough_to_dump}
    stored = json.loads(
        to_column(
            {"huge": 10**5000, "object": {1, 2}, (1, 2): 3, "circle": circle, "deep": deep, "dict": deep_enough_to_dump}
        )
    )
    assert int(stored["huge"], 16) == 10**5000
    assert stored["object"] == "{1, 2}"
    assert stored["(1, 2)"] == 3
    assert stored["circle"] == [1, {"again": "(a part of itself)", "more": "(a part of itself)"}]
    assert "nested too deeply" in json.dumps(stored["deep"])
    assert "nested too deeply" in to_column(deep_enough_to_dump)
