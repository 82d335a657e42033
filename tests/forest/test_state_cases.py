"""Field cases at the level of functions: canonical form, parsers, active time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from manual_clock import ManualClock

from silva.forest.identity import message_digest
from silva.forest.session_forest import SessionForest
from silva.parsers import ParsedCall, ParsedTurn, TurnParser
from silva.turns.session import ActiveTime, Session
from silva.types.messages import Message, ToolCall

PARSER = TurnParser.from_names(reasoning="auto", tool_call="auto")
CALL = ToolCall(id="call_1", name="f", arguments='{"city": "Paris","n":1.0,"k":1e3}')


def _asking(arguments: str) -> Message:
    return Message(role="assistant", tool_calls=(replace(CALL, arguments=arguments),))


def test_api_01_broken_arguments_have_an_identity_of_their_own() -> None:
    broken = [_asking(text) for text in ('{"value": ', '{"value":', '{"value": "', "", "{}")]
    assert len({message_digest(message) for message in broken}) == len(broken)
    assert message_digest(broken[0]) == message_digest(_asking('{"value": '))


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": }</tool_call>', "", (ParsedCall(name="f", arguments='{"a": }'),)),
        ('<tool_call>{"name":', '<tool_call>{"name":', ()),
        ("<tool_call>\nnot json\n</tool_call>", "<tool_call>\nnot json\n</tool_call>", ()),
    ],
)
def test_api_03_a_malformed_call_is_a_raw_call_or_text(text: str, content: str, calls: tuple[ParsedCall, ...]) -> None:
    assert PARSER.parse(text) == ParsedTurn(content=content, calls=calls)


def test_api_04_thoughts_that_were_cut_are_reasoning() -> None:
    assert PARSER.parse("let me see", opening="<|im_start|>assistant\n<think>\n") == ParsedTurn(
        content="", reasoning="let me see"
    )
    assert PARSER.parse("<think>\nlet me see") == ParsedTurn(content="", reasoning="let me see")


def test_tok_08_blanks_of_the_model_stay_where_they_are() -> None:
    turn = PARSER.parse("<think>\n plan \n</think>\n\n  answer \n")
    assert (turn.reasoning, turn.content) == (" plan ", "  answer \n")


def test_tok_09_a_turn_of_calls_alone_has_no_content() -> None:
    turn = PARSER.parse('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n')
    assert turn.content == ""
    message = Message(role="assistant", tool_calls=(CALL,))
    assert message.to_chat()["content"] is None
    assert message_digest(message) == message_digest(Message(role="assistant", content="", tool_calls=(CALL,)))


@pytest.mark.parametrize(
    "echo",
    [
        '{"city":"Paris","n":1.0,"k":1000.0}',
        '{"city": "Paris", "k": 1e3, "n": 1.0}',
        '{"city":"Paris","n":1,"k":1000}',
        '{"city":"\\u0050aris","n":1,"k":1000}',
    ],
)
def test_tok_10_arguments_equal_as_json_are_the_same_turn(echo: str) -> None:
    assert message_digest(_asking(echo)) == message_digest(_asking(CALL.arguments))


@pytest.mark.parametrize(
    ("sampled", "echo"),
    [
        ('{"city": "Paris"}', '{"city": "Lyon"}'),
        ('{"a":1,"a":2}', '{"a":2}'),
        ('{"a":12345678901234567890}', '{"a":12345678901234567000}'),
    ],
)
def test_tok_10_other_values_are_another_turn(sampled: str, echo: str) -> None:
    assert message_digest(_asking(sampled)) != message_digest(_asking(echo))


def test_tok_14_reasoning_that_the_prompt_opened_is_reasoning() -> None:
    turn = PARSER.parse("plan</think>\n\nhi", opening="<|im_start|>assistant\n<think>\n")
    assert turn == ParsedTurn(content="hi", reasoning="plan")


def test_tok_17_each_meaningful_field_is_part_of_the_identity() -> None:
    base = Message(role="assistant", content="c", reasoning="r", tool_calls=(CALL,))
    others = [
        replace(base, content="d"),
        replace(base, reasoning="s"),
        replace(base, tool_calls=(replace(CALL, name="g"),)),
        replace(base, tool_calls=(replace(CALL, arguments="{}"),)),
        replace(base, tool_calls=(replace(CALL, id="call_2"),)),
        replace(base, tool_calls=()),
        Message(role="user", content="c"),
        Message(role="tool", content="c", tool_call_id="call_1"),
        Message(role="tool", content="c", tool_call_id="call_2"),
    ]
    assert len({message_digest(message) for message in (base, *others)}) == len(others) + 1
    assert message_digest(replace(base)) == message_digest(base)


async def test_proc_05_only_time_with_the_lease_counts() -> None:
    clock = ManualClock()
    session = Session(session_id="s", group_id="g", mode="train", clock=clock, forest=SessionForest())
    await clock.advance(20.0)
    assert (session.active.elapsed_s(), session.gate.is_set()) == (0.0, False)
    session.open_gate()
    await clock.advance(3.0)
    session.close_gate()
    assert not session.gate.is_set()
    await clock.advance(20.0)
    session.open_gate()
    await clock.advance(1.0)
    assert session.active.elapsed_s() == pytest.approx(4.0)
    assert session.since_start_s() == pytest.approx(44.0)
    await clock.advance(6.0)
    assert session.active.elapsed_s() == pytest.approx(10.0)


async def test_proc_05_opening_or_closing_twice_counts_nothing_twice() -> None:
    clock = ManualClock()
    active = ActiveTime(clock)
    active.pause()
    await clock.advance(1.0)
    active.resume()
    await clock.advance(2.0)
    active.resume()
    await clock.advance(3.0)
    assert active.running
    active.pause()
    await clock.advance(4.0)
    active.pause()
    assert not active.running
    assert active.elapsed_s() == pytest.approx(5.0)
