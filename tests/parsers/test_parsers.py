"""From sampled text to messages."""

from __future__ import annotations

import json
import re

import pytest
from char_codec import assistant_text
from hypothesis import assume, example, given
from hypothesis import strategies as st

from silva.parsers import ParsedCall, ParsedTurn, TurnParser, read_call
from silva.parsers.parts import first_of, json_end
from silva.types.messages import Message, ToolCall


def named(reasoning: bool, tool_calls: bool) -> TurnParser:
    names = {True: "generic", False: "none"}
    return TurnParser.from_names(reasoning=names[reasoning], tool_call=names[tool_calls])


FULL = TurnParser.from_names(reasoning="generic", tool_call="generic")
PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "a", "{", "}", '"', ":", ",", "[", "\\",
    '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {"a": "', '{"name": "f"', '"arguments"', '"name"',
    "1e999", "\ud800", "\x00", "é",
]  # fmt: skip
jumbled = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
openings = st.sampled_from(["", "assistant\n", "assistant\n<think>\n", "<think>", "<think>\n\n</think>\n\n"])

plain = st.text(alphabet=st.sampled_from(list("ab<>{}\"'\\ \n\té🙂")), max_size=12)
json_objects = st.dictionaries(
    st.text(max_size=3),
    st.integers() | st.text(max_size=5) | st.none() | st.lists(st.booleans(), max_size=2),
    max_size=3,
)
calls = st.builds(
    lambda name, arguments, indent: ToolCall(id="", name=name, arguments=json.dumps(arguments, indent=indent)),
    st.text(alphabet="abc_.-1", min_size=1, max_size=6),
    json_objects,
    st.sampled_from([None, 1]),
)


@given(st.text() | jumbled, openings, st.booleans(), st.booleans())
def test_any_text_parses(text: str, opening: str, reasoning: bool, tool_calls: bool) -> None:
    turn = named(reasoning, tool_calls).parse(text, opening=opening)
    assert reasoning or not turn.reasoning
    assert tool_calls or not turn.calls
    assert all(call.name.strip() for call in turn.calls)


@given(st.text() | jumbled)
def test_parsers_that_are_off_return_the_text(text: str) -> None:
    assert TurnParser.from_names(reasoning="none", tool_call="none").parse(text) == ParsedTurn(content=text)


@given(jumbled)
@example("<tool_call>junk</tool_call>\n\n")
@example("\n\na\n")
@example("<tool_call>{} \n</tool_")
def test_text_without_a_readable_block_is_untouched(text: str) -> None:
    turn = FULL.parse(text)
    assume(not turn.calls and "<think>" not in text)
    assert turn == ParsedTurn(content=text)


@given(jumbled, openings)
def test_reasoning_loses_only_newlines(text: str, opening: str) -> None:
    turn = named(True, False).parse(text, opening=opening)
    inside = opening.rstrip("\n").endswith("<think>")
    if not inside and not re.match(r"\n*<think>", text):
        assert turn == ParsedTurn(content=text)
        return
    head = "\n?" if inside else "\n*<think>\n?"
    middle = "\n?</think>\n{0,2}" if "</think>" in text else ""
    shape = head + re.escape(turn.reasoning) + middle + re.escape(turn.content)
    assert re.fullmatch(shape, text)


@given(jumbled)
def test_calls_take_nothing_from_the_text_around_them(text: str) -> None:
    turn = named(False, True).parse(text)
    assume(not any("</tool_call>" in call.arguments for call in turn.calls))
    outside = re.sub(r"<tool_call>.*?(</tool_call>|\Z)", "", text, flags=re.S).replace("\n", "")
    assert _is_subsequence(outside, turn.content)
    assert _is_subsequence(turn.content, text)


def _is_subsequence(short: str, long: str) -> bool:
    rest = iter(long)
    return all(char in rest for char in short)


@given(plain, plain, st.lists(calls, max_size=3), st.booleans())
def test_a_turn_as_templates_write_it_parses_back(
    reasoning: str, content: str, calls: list[ToolCall], in_think: bool
) -> None:
    if reasoning or in_think or calls:
        content = content.strip("\n")
    message = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=tuple(calls))
    text = assistant_text(message, in_think=in_think)
    turn = FULL.parse(text, opening="assistant\n<think>\n" if in_think else "assistant\n")
    parsed = tuple(ParsedCall(name=call.name, arguments=call.arguments) for call in calls)
    assert turn == ParsedTurn(content=content, reasoning=reasoning, calls=parsed)


@given(plain, plain, st.lists(calls, max_size=2), st.data())
def test_a_cut_turn_shows_no_more_than_was_sampled(
    reasoning: str, content: str, calls: list[ToolCall], data: st.DataObject
) -> None:
    content = content.strip("\n")
    message = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=tuple(calls))
    text = assistant_text(message)
    turn = FULL.parse(text[: data.draw(st.integers(0, len(text)))])
    whole = FULL.parse(text)
    assert len(turn.calls) <= len(whole.calls)
    for shown, meant in zip(turn.calls, whole.calls, strict=False):
        assert shown.name == meant.name
        assert meant.arguments.startswith(shown.arguments.rstrip("}").rstrip())
    if "<tool_call>" not in turn.content:
        assert (reasoning + "\n</think>").startswith(turn.reasoning) or not reasoning


@pytest.mark.parametrize(
    ("body", "name", "arguments"),
    [
        ('{"name": "f", "arguments": {"a":  1.0}}', "f", '{"a":  1.0}'),
        ('\n {"arguments": {"b": [1, 2]}, "name": "f"}\n', "f", '{"b": [1, 2]}'),
        ('{"name": "f", "parameters": {}}', "f", "{}"),
        ('{"name": "f"}', "f", "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', "f", '{"a": 1}'),
        ('{"name": "f", "arguments": null}', "f", "null"),
        ('{"name": "f", "id": 7, "type": "function"}', "f", "{}"),
        ('{"id": 7, "city": {"a":  1}, "name": "f", "n": 2}', "f", '"city": {"a":  1}, "n": 2'),
        ('{"name": "f", "arguments": {"a": }', "f", '{"a": }'),
        ('{"name": "f", "arguments": {"a": }}', "f", '{"a": }'),
        ('{"name": "f", "arguments": {"a": "unclosed', "f", '{"a": "unclosed'),
        ('{"name": "f", "arguments": ', "f", ""),
        ('{"name": "f"', "f", ""),
        ('{"name": "\\u0066", "arguments": {]}', "f", "{]}"),
        ('{"name": "f", "arguments": {"a": 1, "a": 2}}', "f", '{"a": 1, "a": 2}'),
        ('{"name": "f", "arguments": ' + "[" * 5000, "f", "[" * 5000),
    ],
)
def test_a_clear_name_is_a_call(body: str, name: str, arguments: str) -> None:
    assert read_call(body) == ParsedCall(name=name, arguments=arguments)


@pytest.mark.parametrize(
    "body",
    [
        "", "{", "null", "[]", '"f"', '{"name":', '{"name": "f', '{"name": 5, "arguments": {}}', '{"name": " "}',
        '{"name": ""}', '{"arguments": {}}', '{"name": "\\ud800"}', '{"name": "f", "argum',
        '{"name": "f" "arguments": {}}', "[" * 100_000, '{"a":' * 100_000,
    ],
)  # fmt: skip
def test_no_clear_name_is_no_call_and_stays_text(body: str) -> None:
    assert read_call(body) is None
    text = f"before\n<tool_call>{body}</tool_call>\nafter\n"
    assert FULL.parse(text) == ParsedTurn(content=text)


def test_a_closing_mark_inside_an_argument_closes_nothing() -> None:
    arguments = '{"text": "<tool_call>x</tool_call> \\" </tool_call>"}'
    text = f'ok\n<tool_call>\n{{"name": "write", "arguments": {arguments}}}\n</tool_call>\n<tool_call>{{"name": "g"}}'
    turn = FULL.parse(text + "</tool_call>")
    assert turn.content == "ok"
    assert turn.calls == (
        ParsedCall(name="write", arguments=arguments),
        ParsedCall(name="g", arguments="{}"),
    )


def test_text_after_a_call_is_kept_and_newlines_at_the_end_are_not() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert FULL.parse(f"a\n\n{call}\nb\n").content == "a\n\nb\n"
    assert FULL.parse(f"a {call}\n\n").content == "a "
    assert FULL.parse(f"{call}<tool_call>junk</tool_call>\n").content == "<tool_call>junk</tool_call>\n"


def test_a_call_inside_reasoning_is_thought_not_made() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert FULL.parse(f"<think>{call}</think>no") == ParsedTurn(content="no", reasoning=call)
    assert FULL.parse(f"hm {call}", opening="<think>\n") == ParsedTurn(content="", reasoning=f"hm {call}")


def test_the_newline_behind_the_opening_mark_belongs_to_the_template() -> None:
    plan = ParsedTurn(content="hi", reasoning=" plan")
    assert FULL.parse("\n plan\n</think>\n\nhi", opening="assistant\n<think>") == plan
    assert FULL.parse("<think>\n plan\n</think>\n\nhi", opening="assistant\n") == plan
    assert FULL.parse("\n plan\n</think>\n\nhi", opening="assistant\n<think>\n").reasoning == "\n plan"


@pytest.mark.parametrize("name", ["none", "auto", "generic"])
def test_known_parsers(name: str) -> None:
    assert TurnParser.from_names(reasoning=name, tool_call="none") == named(name != "none", False)
    assert TurnParser.from_names(reasoning="none", tool_call=name) == named(False, name != "none")


def test_an_unknown_parser_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match="agentic_tool_call_parser is 'hermess'; known parsers are none, auto, generic"
    ):
        TurnParser.from_names(reasoning="auto", tool_call="hermess")
    with pytest.raises(ValueError, match="agentic_reasoning_parser is 'hermes'"):
        TurnParser.from_names(reasoning="hermes", tool_call="none")


@given(st.integers(480, 540), st.sampled_from(["a", "\\\\", '\\"', "\\u00e9", "é"]), st.sampled_from(["", "<", "}"]))
def test_json_that_is_longer_than_a_window_ends_where_it_ends(num: int, filler: str, behind: str) -> None:
    for text in (
        f'{{"k": "{filler * num}", "n": 12345}}',
        " " + "[1, true, " * (num // 4) + "-1.5e3" + "]" * (num // 4),
    ):
        assert json_end(text + behind, 0) == len(text)
        assert json_end(text[: num + 3], 0) == -1
        assert json_end(text[:num] + "?" + text[num:], 0) in (-1, len(text) + 1)


@given(jumbled, st.lists(st.sampled_from(["<think>", "</tool_call>", "a"]), max_size=3), st.integers(0, 1200))
def test_the_first_mark_is_found_over_all_windows(text: str, marks: list[str], num: int) -> None:
    text = "x" * num + text
    assert first_of(text, 0, marks) == min((text.find(m) for m in marks if m in text), default=-1)
