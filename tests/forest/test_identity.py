"""Canonical form and chained keys."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.forest.identity import (
    KEY_BYTES,
    MAX_FOLDED_DEPTH,
    canonical_arguments,
    chain_key,
    chain_keys,
    message_digest,
    root_key,
)
from silva.types.errors import RequestError
from silva.types.messages import Conversation, Message, ToolCall

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    "spellings",
    [
        ['{"city": "Paris","n":1.0,"k":1e3}', '{"city":"Paris","n":1,"k":1000}', '{"k":1000,"n":1,"city":"Paris"}'],
        [r'{"a": "\u00e9\/\t"}', '{"a":"é/\\t"}'],
        ["[1,2]", " [ 1 ,\n2 ] ", "[1.0,2e0]", "[10e-1,0.2E+1]"],
        ["0", "-0", "0.0", "-0.0", "0e500"],
        ["10000.0", "10000", "1E4"],
        ["0.1", "1e-1", "0.10"],
        ["12345678901234567890.5", "1.2345678901234567e19", "12345678901234567000"],
        ["1e300", "1" + "0" * 300],
        ['{"a": null}', '{"a":null}'],
    ],
)
def test_spellings_of_one_json_value_fold(spellings: list[str]) -> None:
    assert len({canonical_arguments(text) for text in spellings}) == 1


@pytest.mark.parametrize(
    "values",
    [
        ['{"a":1}', '{"a":"1"}', '{"a":true}', '{"a":null}', "{}", '{"a":1.5}', '{"a":[1]}'],
        ['{"a":1,"a":2}', '{"a":2}', '{"a":1}', r'{"a":1,"\u0061":2}'],
        ["12345678901234567890", "12345678901234567000", "12345678901234567891"],
        ["[1,2]", "[2,1]", "[[1],2]"],
        ["NaN", '"NaN"', "Infinity", "-Infinity", "null"],
        ['{"value": ', '{"value":', "{}"],
        ['"e\u0301"', '"\u00e9"'],
        ["", " ", '""', "raw:"],
        ["0", "5e-324", "1e-320"],
        ["1e400", "1e401"],
        [r'"\ud800"', r'"\udc00"', '"\ud800', '""'],
    ],
)
def test_different_arguments_stay_different(values: list[str]) -> None:
    assert len({canonical_arguments(text) for text in values}) == len(values)


@pytest.mark.parametrize(
    "raw",
    [
        "9" * 5000,
        "-" + "9" * 5000,
        "1e99999999999999999999",
        "1e-99999999999999999999",
        "1" * 500 + ".0",
        "[" * 100_000,
        "[" * (MAX_FOLDED_DEPTH + 1) + "]" * (MAX_FOLDED_DEPTH + 1),
        '{"a":' * 5000 + "1" + "}" * 5000,
        "\ud800",
        r'{"a": "\ud800"}',
        r'{"\uDC00": 1}',
        '{"a": "\x00"}',
        "\ufeff{}",
    ],
)
def test_arguments_that_no_client_can_carry_stand_for_themselves(raw: str) -> None:
    assert canonical_arguments(raw) == "raw:" + raw


def test_folding_does_not_depend_on_the_depth_of_the_caller() -> None:
    texts = ["[" * depth + "1.0" + "]" * depth for depth in (MAX_FOLDED_DEPTH, MAX_FOLDED_DEPTH + 1, 300)]

    def deep(frames: int) -> list[str]:
        return deep(frames - 1) if frames else [canonical_arguments(text) for text in texts]

    assert deep(0) == deep(500)
    assert [text.startswith("raw:") for text in deep(0)] == [False, True, True]


@given(st.text() | st.text(alphabet='{}[]",:0123456789.eE+-\\u truefalsn', max_size=40))
def test_folding_takes_any_text(text: str) -> None:
    folded = canonical_arguments(text)
    if folded.startswith("raw:"):
        assert folded == "raw:" + text
    else:
        assert canonical_arguments(folded) == folded


@given(json_values, st.data())
def test_a_client_that_reads_and_writes_arguments_keeps_their_identity(value: object, data: st.DataObject) -> None:
    written = json.dumps(
        value,
        ensure_ascii=data.draw(st.booleans()),
        indent=data.draw(st.sampled_from([None, 0, 2])),
        sort_keys=data.draw(st.booleans()),
    )
    again = json.dumps(json.loads(written), separators=(",", ":"))
    assert canonical_arguments(written) == canonical_arguments(again)


@given(json_values, json_values)
def test_equal_identity_means_equal_values(left: object, right: object) -> None:
    same = canonical_arguments(json.dumps(left)) == canonical_arguments(json.dumps(right))
    assert same == (_plain(left) == _plain(right))


def _plain(value: object) -> object:
    """A value that compares as JSON does: 1.0 equals 1 (whole doubles by their shortest spelling), True does not."""
    if isinstance(value, bool) or value is None:
        return ("constant", value)
    if isinstance(value, float):
        mantissa, _, exponent = f"{value!r}e0".split("e")[:3] if "e" in repr(value) else (repr(value), "", "0")
        digits = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        places = len(digits.partition(".")[2])
        power = int(exponent or "0") - places
        whole = int(digits.replace(".", ""))
        return ("number", whole * 10**power) if power >= 0 or whole == 0 else ("fraction", value)
    if isinstance(value, int):
        return ("number", value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


calls = st.builds(
    ToolCall, id=st.text(max_size=3), name=st.text(max_size=3), arguments=st.sampled_from(["{}", "[]", "", '"', "{"])
)
messages = st.one_of(
    st.builds(Message, role=st.sampled_from(["system", "user"]), content=st.text(max_size=4)),
    st.builds(
        Message,
        role=st.just("assistant"),
        content=st.text(max_size=4),
        reasoning=st.text(max_size=4),
        tool_calls=st.lists(calls, max_size=2).map(tuple),
    ),
    st.builds(Message, role=st.just("tool"), content=st.text(max_size=4), tool_call_id=st.none() | st.text(max_size=4)),
)


@given(messages, messages)
def test_digests_are_equal_exactly_for_equal_messages(left: Message, right: Message) -> None:
    assert (message_digest(left) == message_digest(right)) == (left == right)


def test_no_two_ways_to_cut_a_text_into_fields_share_a_digest() -> None:
    call = ToolCall(id="b", name="c", arguments="{}")
    variants = [
        Message(role="assistant", content="ab"),
        Message(role="assistant", content="a", reasoning="b"),
        Message(role="assistant", reasoning="ab"),
        Message(role="assistant", content="a", tool_calls=(call,)),
        Message(role="assistant", content="a", tool_calls=(ToolCall(id="bc", name="", arguments="{}"),)),
        Message(role="assistant", content="a", tool_calls=(ToolCall(id="", name="bc", arguments="{}"),)),
        Message(role="assistant", content="a", tool_calls=(ToolCall(id="d", name="c", arguments="{}"),)),
        Message(role="assistant", content="a", tool_calls=(call, call)),
        Message(role="assistant", content='a","","b'),
        Message(role="assistant", content="a", tool_calls=(ToolCall(id="b", name="c", arguments='"{}"'),)),
        Message(role="user", content="ab"),
        Message(role="system", content="ab"),
        Message(role="tool", content="ab"),
        Message(role="tool", content="a", tool_call_id="b"),
        Message(role="tool", content="ab", tool_call_id=""),
        Message(role="tool", content="ab", tool_call_id="null"),
        Message(role="user", content="a\x00b"),
        Message(role="user", content="\ud800"),
        Message(role="user", content="\\ud800"),
    ]
    assert len({message_digest(message) for message in variants}) == len(variants)


def _tool(**extra: object) -> dict[str, object]:
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"minimum": 1}}}}
    return {"type": "function", "function": {**function, **extra}}


def _root(*tools: dict[str, object], **kwargs: object) -> bytes:
    return root_key(Conversation(tools=tools, template_kwargs=kwargs))


def test_a_root_ignores_what_says_nothing_about_the_function() -> None:
    plain = _root(_tool())
    parameters = {"$schema": "http://x", "properties": {"x": {"minimum": 1.0}}, "type": "object"}
    assert _root(_tool(strict=True)) == plain
    assert _root({**_tool(), "cache_control": {"type": "ephemeral"}, "strict": None}) == plain
    assert _root(_tool(defer_loading=True, eager_input_streaming=False)) == plain
    assert _root(_tool(parameters=parameters)) == plain
    assert _root(dict(reversed(_tool().items()))) == plain
    assert _root(_tool(), a=1, b=[1.0]) == _root(_tool(), b=[1], a=1.0)


def test_a_root_keeps_everything_else() -> None:
    nested = {"type": "object", "properties": {"x": {"minimum": 1, "$schema": "s", "strict": True}}}
    roots = [
        _root(),
        _root(_tool()),
        _root(_tool(), _tool()),
        _root(_tool(description="e")),
        _root(_tool(name="g")),
        _root(_tool(), _tool(name="g")),
        _root(_tool(name="g"), _tool()),
        _root(_tool(parameters={"type": "object", "properties": {"x": {"minimum": 2}}})),
        _root(_tool(parameters=nested)),
        _root(enable_thinking=True),
        _root(enable_thinking=False),
        _root(enable_thinking=1),
        _root(enable_thinking="true"),
        _root(enable_thinking=None),
        _root(a={}, b=[]),
        _root(a=[], b={}),
    ]
    assert len(set(roots)) == len(roots)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), [[float("-inf")]]])
def test_a_root_refuses_numbers_that_are_not_finite(bad: object) -> None:
    with pytest.raises(RequestError, match=r"chat_template_kwargs .*out of range") as caught:
        _root(a=bad)
    assert (caught.value.field, caught.value.status) == ("chat_template_kwargs", 400)


def test_a_root_refuses_bottomless_tools() -> None:
    deep: dict[str, object] = {}
    for _ in range(400):
        deep = {"a": deep}
    with pytest.raises(RequestError, match="levels of nesting") as caught:
        _root(_tool(parameters=deep))
    assert caught.value.field == "tools"


@given(st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), max_size=5))
def test_keys_chain(digests: list[bytes]) -> None:
    root = _root()
    keys = chain_keys(root, digests)
    assert len({root, *keys}) == len(digests) + 1
    for length, key in enumerate(keys):
        assert key == chain_key(keys[length - 1] if length else root, digests[length])
        assert key == chain_keys(root, digests[: length + 1])[-1]
