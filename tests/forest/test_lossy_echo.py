"""A lossy echo is never taken for another answer: what was matched says what came back, but for what was declared."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.forest.echo import compare_echo
from silva.forest.identity import canonical_arguments, message_digest
from silva.forest.node import Node
from silva.forest.placement import Match, Placement, Response
from silva.forest.session_forest import SessionForest
from silva.types.generation import GenerateResult, VersionSpan
from silva.types.messages import Conversation, Message, ToolCall

PLAIN = Conversation(template_kwargs={})
RESULT = GenerateResult(
    ids=[7],
    logprobs=[-1.0],
    kept_mass=[1.0],
    finish_reason="stop",
    version_spans=(VersionSpan(start=0, length=1, version=0),),
)
History = tuple[Message, ...]


def find(forest: SessionForest, history: History, *, lenient: bool = True) -> Match:
    return forest.match(PLAIN, [message_digest(m) for m in history], history.__getitem__, lenient)


def answer(forest: SessionForest, history: History, message: Message) -> Node:
    """Commit one more answer to a history, new messages and all."""
    match = find(forest, history)
    placement = Placement(
        match=match, messages=match.as_known(match.num_matched, history[match.num_matched :]), observation_ids=(1,)
    )
    return forest.commit(placement, Response(result=RESULT, message=message, digest=message_digest(message)))


contents = st.sampled_from(["", "a", " a", "a\n", "a b", "a  b", "b"])
thoughts = st.sampled_from(["", "r", " r", "q"])
arguments = st.sampled_from(["{}", '{"x": 1}', '{"x":1.0}', '{"x": 2}', '{"x": '])
calls = st.lists(st.builds(ToolCall, id=st.just(""), name=st.sampled_from("fg"), arguments=arguments), max_size=2)
answers = st.builds(
    Message, role=st.just("assistant"), content=contents, reasoning=thoughts, tool_calls=calls.map(tuple)
)
names = st.sampled_from(["", "c0-0", "c0-1", "c1-0", "n", "m"])


@st.composite
def echoes(draw: st.DrawFn, said: Message) -> Message:
    """What comes back of an answer: all of it, with losses, or something else that looks like it."""
    content, reasoning = draw(st.just(said.content) | contents), draw(st.just(said.reasoning) | thoughts)
    new = [replace(call, id=draw(st.just(call.id) | names)) for call in said.tool_calls]
    if new and draw(st.integers(0, 5)) == 0:
        new[-1] = replace(new[-1], arguments=draw(arguments), name=draw(st.sampled_from("fg")))
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=tuple(new))


def says(echo: Message, said: Message, results: list[str], kinds: tuple[str, ...]) -> bool:
    """Whether an echo is this answer, but for losses of the declared kinds."""
    fits = echo.content == said.content or ("blanks" in kinds and echo.content.strip() == said.content.strip())
    thought = echo.reasoning == said.reasoning or (
        "blanks" in kinds and echo.reasoning.strip() == said.reasoning.strip()
    )
    fits = fits and (thought or ("reasoning_missing" in kinds and not echo.reasoning.strip()))
    mine, given = ([(c.name, canonical_arguments(c.arguments)) for c in m.tool_calls] for m in (echo, said))
    ids = [call.id for call in echo.tool_calls]
    if ids == [call.id for call in said.tool_calls]:
        return fits and mine == given
    own = [name for name in ids if name]
    known = {mine or call.id for mine, call in zip(ids, said.tool_calls, strict=False)}
    return fits and mine == given and "call_ids" in kinds and len(set(own)) == len(own) and set(results) <= known


ALL = ("blanks", "reasoning_missing", "call_ids")


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_what_is_matched_says_what_came_back(data: st.DataObject) -> None:
    forest = SessionForest()
    hi = Message(role="user", content="hi")
    said: list[tuple[Message, Node]] = []
    for number, drawn in enumerate(data.draw(st.lists(answers, min_size=1, max_size=4))):
        message = replace(
            drawn, tool_calls=tuple(replace(c, id=f"c{number}-{at}") for at, c in enumerate(drawn.tool_calls))
        )
        said.append((message, answer(forest, (hi,), message)))
    echo = data.draw(echoes(data.draw(st.sampled_from(said))[0]))
    results = [data.draw(st.sampled_from([c.id for c in echo.tool_calls]) | names) for _ in echo.tool_calls]
    tail = [Message(role="tool", content="r", tool_call_id=name) for name in results]
    history = (hi, echo, *tail, Message(role="user", content="go"))

    match = find(forest, history)
    same = [node for message, node in said if message_digest(message) == message_digest(echo)]
    fitting = [node for message, node in said if says(echo, message, results, ALL)]
    if same:
        assert (match.parent, match.aliases) == (same[-1], ())
    elif not fitting:
        assert match.num_matched == 1 and match.aliases == ()
    else:
        assert match.parent is fitting[-1] and match.num_matched == 2
        (alias,) = match.aliases
        kinds = alias.repair.kinds
        assert kinds and len(set(kinds)) == len(kinds)
        assert says(echo, fitting[-1].messages[0], results, kinds)
        for kind in set(kinds) - {"ambiguous"}:  # none is declared that was not needed
            assert not says(echo, fitting[-1].messages[0], results, tuple(k for k in kinds if k != kind))
        assert ("ambiguous" in kinds) == (len({node.key for node in fitting}) > 1)
        given = dict(
            zip((c.id for c in echo.tool_calls), (c.id for c in fitting[-1].messages[0].tool_calls), strict=True)
        )
        known = match.as_known(2, history[2:])
        assert [m.tool_call_id for m in known[:-1]] == [given.get(name, name) for name in results]
    strict = find(forest, history, lenient=False)
    assert (strict.parent is same[-1]) if same else strict.num_matched == 1

    # Once it was answered the spelling is known: the same request needs no repair, and its line goes on.
    node = answer(forest, history, Message(role="assistant", content="ok"))
    again = (*history, Message(role="assistant", content="ok"), hi)
    after = find(forest, again)
    assert (after.parent, after.num_matched, after.aliases) == (node, len(history) + 1, ())


@settings(max_examples=60)
@given(st.data())
def test_losses_in_some_turns_only_still_make_one_line(data: st.DataObject) -> None:
    forest = SessionForest()
    turns: list[tuple[Message, Node]] = []
    for number in range(data.draw(st.integers(1, 5))):
        history: list[Message] = [Message(role="user", content="hi")]
        for at, (message, _) in enumerate(turns):
            loss = data.draw(st.integers(0, 15))
            if loss & 8 and not message.content.strip() and not message.tool_calls:
                history.append(Message(role="user", content=f"go {at}"))
                continue
            ids = {call.id: f"{number}/{call.id}" if loss & 4 else call.id for call in message.tool_calls}
            history.append(
                replace(
                    message,
                    content=message.content.strip() if loss & 1 else message.content,
                    reasoning="" if loss & 2 else message.reasoning,
                    tool_calls=tuple(replace(call, id=ids[call.id]) for call in message.tool_calls),
                )
            )
            history += [Message(role="tool", content="r", tool_call_id=name) for name in ids.values()]
            history.append(Message(role="user", content=f"go {at}"))
        match = find(forest, tuple(history))
        assert match.parent is (turns[-1][1] if turns else None)
        drawn = data.draw(answers)
        made = tuple(replace(c, id=f"c{number}-{at}") for at, c in enumerate(drawn.tool_calls))
        message = replace(drawn, tool_calls=made)
        turns.append((message, answer(forest, tuple(history), message)))
    assert [node.parent and node.parent.parent for _, node in turns[1:]] == [node for _, node in turns[:-1]]


def test_an_answer_shown_with_its_calls_as_text_is_another_message() -> None:
    said = Message(role="assistant", content="A", tool_calls=(ToolCall(id="c", name="f", arguments="{}"),))
    flat = Message(role="assistant", content='A\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    assert compare_echo(flat, said) is None and compare_echo(replace(said, tool_calls=()), said) is None


HI, GO = Message(role="user", content="hi"), Message(role="user", content="go")
NOTHING = Message(role="assistant")


def test_of_two_empty_answers_that_are_missing_the_newest_is_taken_and_it_stays() -> None:
    forest = SessionForest()
    answer(forest, (HI,), NOTHING)
    newest = answer(forest, (HI,), replace(NOTHING, reasoning="r"))
    match = find(forest, (HI, GO))
    assert (match.parent, match.num_matched) == (newest, 1)
    assert match.repairs == ["answer_missing", "reasoning_missing", "ambiguous"]
    node = answer(forest, (HI, GO), Message(role="assistant", content="ok"))
    answer(forest, (HI,), NOTHING)  # newer still, but the line has gone on
    after = find(forest, (HI, GO, Message(role="assistant", content="ok"), HI))
    assert (after.parent, after.repairs) == (node, [])


def test_nothing_is_missing_before_a_result_an_answer_or_the_end_or_behind_other_words() -> None:
    forest = SessionForest()
    node = answer(forest, (HI,), NOTHING)
    result = Message(role="tool", content="r", tool_call_id="c")
    for tail in ((), (result,), (Message(role="assistant", content="other"), GO)):
        match = find(forest, (HI, *tail))
        assert (match.parent, match.repairs) == (node.parent, [])
    assert find(forest, (GO, GO)).num_matched == 0
    assert find(forest, (HI, GO), lenient=False).parent is node.parent
    said = answer(forest, (GO,), Message(role="assistant", content="said"))
    assert find(forest, (GO, GO)).parent is said.parent


def test_a_history_without_the_empty_answer_may_be_a_state_of_its_own() -> None:
    """The longer request was placed before the empty answer to the shorter one came."""
    forest = SessionForest()
    longer = find(forest, (HI, GO))
    answer(forest, (HI,), NOTHING)
    answer(forest, (HI, GO), Message(role="assistant", content="behind"))
    assert find(forest, (HI, GO)).num_matched == 2
    alone = forest.commit(
        Placement(match=longer, messages=(HI, GO), observation_ids=(1,)),
        Response(result=RESULT, message=NOTHING, digest=message_digest(NOTHING)),
    )
    assert find(forest, (HI, GO)).parent is alone.parent
    assert find(forest, (HI, NOTHING, GO)).parent is not alone.parent
