"""The one reader of JSON that others wrote."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.types.strict_json import JsonFault, TooDeep, finite_number, read_json, read_json_at

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, st.booleans())
def test_every_value_comes_back(value: Any, unique: bool):
    text = json.dumps(value)
    assert read_json(text, unique_keys=unique) == value == read_json(text.encode())
    assert read_json_at("12 " + text, 3) == (value, len(text) + 3)


@pytest.mark.parametrize("text", ["NaN", "[-Infinity]", '{"a": Infinity}'])
def test_constants_are_no_json_unless_the_caller_takes_them(text: str):
    with pytest.raises(JsonFault, match=r"is no JSON value"):
        read_json(text)
    read_json(text, constants=True)


def test_a_key_that_comes_twice_is_named_where_keys_must_be_unique():
    text = '[{"a": {"b": 1, "b": 2}}]'
    assert read_json(text) == [{"a": {"b": 2}}]
    for read in (lambda: read_json(text, unique_keys=True), lambda: read_json_at(text, 0)):
        with pytest.raises(JsonFault, match="the key 'b' occurs twice"):
            read()


def test_the_caller_says_what_a_number_is():
    assert read_json("[1e999, 1.50]") == [float("inf"), 1.5]
    assert read_json("1.50", parse_float=Decimal) == Decimal("1.50")
    with pytest.raises(JsonFault, match="the number -1e999 is out of range"):
        read_json("-1e999", parse_float=finite_number)


@pytest.mark.parametrize("unique", [False, True])
def test_what_python_cannot_hold_is_a_fault_with_words(unique: bool):
    with pytest.raises(TooDeep, match="nested too deeply"):
        read_json("[" * 200_000, unique_keys=unique)
    with pytest.raises(JsonFault, match="too many digits"):
        read_json("9" * 5000, unique_keys=unique)
    with pytest.raises(json.JSONDecodeError):
        read_json('{"a"', unique_keys=unique)
