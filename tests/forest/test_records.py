"""Records of explicit export against random forests: told back, even with losses, each state is found; edited, none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from silva.forest.identity import canonical_arguments, message_digest, root_key
from silva.forest.node import Node
from silva.forest.placement import Placement, Response
from silva.forest.record_faults import RecordHistory, why_unmatched
from silva.forest.records import Candidate, Search, ToldHistories, choose
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


def commit(forest: SessionForest, history: History, answer: Message) -> Node:
    match = forest.match(PLAIN, [message_digest(m) for m in history], history.__getitem__)
    placement = Placement(match=match, messages=history[match.num_matched :], observation_ids=(1,))
    return forest.commit(placement, Response(result=RESULT, message=answer, digest=message_digest(answer)))


def find(told: ToldHistories, history: History, *, lenient: bool) -> Search:
    return told.find(root_key(PLAIN), [message_digest(m) for m in history], history.__getitem__, lenient=lenient)


words = st.sampled_from(["", "a", "b", " a"])
users = st.builds(Message, role=st.sampled_from(["user", "system"]), content=st.sampled_from("ab"))
answers = st.builds(
    Message,
    role=st.just("assistant"),
    content=words,
    reasoning=st.sampled_from(["", "", "r", "q"]),
    tool_calls=st.lists(
        st.builds(ToolCall, id=st.just(""), name=st.just("f"), arguments=st.just("{}")), max_size=2
    ).map(tuple),
)


@st.composite
def forests(draw: st.DrawFn) -> tuple[SessionForest, list[tuple[History, Node]]]:
    """A forest and its states: the history of each as it was committed, and its node."""
    forest = SessionForest()
    states: dict[int, tuple[History, Node]] = {}
    for number in range(draw(st.integers(1, 7))):
        base: History = draw(st.sampled_from([(), *(history for history, _ in states.values())]))
        tail = [Message(role="tool", content=draw(words), tool_call_id=call.id) for call in calls_of(base)]
        tail += draw(st.lists(users, min_size=not tail, max_size=2))
        asked = (*base, *tail)
        answer = draw(answers)
        named = [replace(call, id=f"c{number}-{at}") for at, call in enumerate(answer.tool_calls)]
        answer = replace(answer, tool_calls=tuple(named))
        node = commit(forest, asked, answer)
        states[node.node_id] = ((*asked, answer), node)
        if node.parent is not None and any(above.kind == "response" for above in node.parent.path()):
            states[node.parent.node_id] = (asked, node.parent)
    return forest, list(states.values())


def calls_of(history: History) -> tuple[ToolCall, ...]:
    return history[-1].tool_calls if history else ()


def with_losses(draw: Callable[..., Any], history: History) -> History:
    """The history as a client may have it that trims, drops thoughts and empty answers, and renames calls."""
    told: list[Message] = []
    new: dict[str, str] = {}
    for index, message in enumerate(history):
        lost = draw(st.integers(0, 7)) if message.role == "assistant" else 0
        if message.role == "assistant":
            new = {call.id: f"mine{at}" for at, call in enumerate(message.tool_calls) if lost & 1}
            calls = tuple(replace(call, id=new.get(call.id, call.id)) for call in message.tool_calls)
            reasoning = "" if lost & 2 else message.reasoning
            content = message.content.strip() if lost & 4 else message.content
            message = replace(message, content=content, reasoning=reasoning, tool_calls=calls)
            follows = history[index + 1].role if index + 1 < len(history) else ""
            if lost & 4 and message == Message(role="assistant") and follows in ("user", "system"):
                continue
        elif message.tool_call_id in new:
            message = replace(message, tool_call_id=new[message.tool_call_id or ""])
        told.append(message)
    return tuple(told)


def kept(history: History) -> list[Any]:
    """What no loss takes away of a history."""
    form: list[Any] = []
    names: dict[str, int] = {}
    for message in history:
        if message.role == "assistant":
            names = {call.id: at for at, call in enumerate(message.tool_calls)}
            calls = [(call.name, canonical_arguments(call.arguments)) for call in message.tool_calls]
            if message.content.strip() or calls:
                form.append((message.content.strip(), calls))
        else:
            call = message.tool_call_id
            form.append((message.role, message.content, names.get(call or "", call)))
    return form


@settings(max_examples=50)
@given(forests(), st.data())
def test_every_state_told_back_is_found(made: tuple[SessionForest, list[tuple[History, Node]]], data: st.DataObject):
    forest, states = made
    told = ToldHistories(forest.nodes)
    history_of = {node.node_id: history for history, node in states}
    for history, node in states:
        for lenient in (False, True):
            exact = [found.node for found in find(told, history, lenient=lenient).candidates if not found.kinds]
            assert node in exact and {found.key for found in exact} == {node.key}
        lossy = with_losses(data.draw, history)
        candidates = find(told, lossy, lenient=True).candidates
        assert node in [found.node for found in candidates]
        assert all(kept(history_of[found.node.node_id]) == kept(lossy) for found in candidates)
        assert all(found.kinds for found in candidates if history_of[found.node.node_id] != lossy)


@settings(max_examples=50)
@given(forests(), st.data(), st.booleans())
def test_every_edit_is_refused_with_a_pointer_to_it(
    made: tuple[SessionForest, list[tuple[History, Node]]], data: st.DataObject, lenient: bool
):
    forest, states = made
    told = ToldHistories(forest.nodes)
    history, _ = data.draw(st.sampled_from(states))
    index = data.draw(st.integers(0, len(history) - 1))
    old = history[index]
    edits = {"content": replace(old, content=old.content + "!")}
    if old.role == "tool":
        edits["tool_call_id"] = replace(old, tool_call_id="other")
    if old.tool_calls:
        first, *rest = old.tool_calls
        edits["tool_calls/0/function/arguments"] = replace(old, tool_calls=(replace(first, arguments="[]"), *rest))
        edits["tool_calls/0/function/name"] = replace(old, tool_calls=(replace(first, name="g"), *rest))
    if old.role == "assistant":
        edits["reasoning_content"] = replace(old, reasoning="other")
    field = data.draw(st.sampled_from(sorted(edits)))
    edited = (*history[:index], edits[field], *history[index + 1 :])
    found = find(told, edited, lenient=lenient)
    assert found.candidates == () and found.depth == index
    record = RecordHistory(
        conversation=PLAIN, digests=[message_digest(m) for m in edited], message_at=edited.__getitem__
    )
    assert why_unmatched(told, record, found, lenient=lenient).startswith(f"/messages/{index}/{field} differs: ")


def test_a_record_with_one_state_chooses_before_those_with_several() -> None:
    forest = SessionForest()
    asked = (Message(role="user", content="q"),)
    thought, plain = (
        commit(forest, asked, Message(role="assistant", content="a", reasoning=reasoning)) for reasoning in ("r", "s")
    )
    told = ToldHistories(forest.nodes)

    def candidates(reasoning: str) -> tuple[Candidate, ...]:
        answer = Message(role="assistant", content="a", reasoning=reasoning)
        return find(told, (*asked, answer), lenient=True).candidates

    first, second = choose([candidates(""), candidates("s")])
    assert (first.node, first.rivals, first.shared) == (thought, (plain,), False)
    assert (second.node, second.rivals, second.shared) == (plain, (), False)
    first, second = choose([candidates(""), candidates("")])
    assert [first.node, second.node] == [plain, thought]


def test_the_work_grows_with_the_number_of_messages_only() -> None:
    def num_calls(num_records: int, num_turns: int) -> int:
        forest = SessionForest()
        history: History = ()
        for turn in range(num_turns):
            history = (*history, Message(role="user", content=f"q{turn}"))
            answer = Message(role="assistant", content=f"a{turn}", reasoning="r")
            commit(forest, history, answer)
            history = (*history, replace(answer, reasoning=""))
        digests = [message_digest(message) for message in history]
        count = 0

        def counting(frame: FrameType, event: str, arg: object) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(counting)
        try:
            told = ToldHistories(forest.nodes)
            for _ in range(num_records):
                assert told.find(root_key(PLAIN), digests, history.__getitem__, lenient=True).candidates
        finally:
            sys.setprofile(None)
        return count

    base = num_calls(4, 25)
    assert num_calls(8, 25) < 2.2 * base and num_calls(4, 50) < 2.2 * base
