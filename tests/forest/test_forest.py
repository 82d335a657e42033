"""Shapes of a session's forest, one at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from char_codec import END, CharCodec, ids_of, text_of, twin

from silva.forest.identity import message_digest
from silva.forest.lineage import build_sample, linear_leaf, node_rows
from silva.forest.node import Node
from silva.forest.placement import Placement
from silva.forest.session_forest import SessionForest
from silva.forest.state_index import MAX_SPELLINGS
from silva.parsers import TurnParser
from silva.turns.placing import place_turn
from silva.turns.reading import read_turn
from silva.types.errors import SessionFailure
from silva.types.generation import GenerateResult, VersionSpan
from silva.types.messages import Conversation, Message, ToolCall
from silva.types.rollout import ExportRecord

PLAIN = Conversation(template_kwargs={})
PARSER = TurnParser.from_names(reasoning="generic", tool_call="generic")
OPENING = "<|im_start|>assistant\n"


def user(text: str) -> Message:
    return Message(role="user", content=text)


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def tool(text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id="c")


@dataclass
class Talk:
    """One session: requests are matched and placed by `ask`, generated and committed by `answer`."""

    codec: CharCodec = field(default_factory=CharCodec)
    forest: SessionForest = field(default_factory=SessionForest)
    lenient: bool = False

    def ask(self, *history: Message, conversation: Conversation = PLAIN) -> Placement:
        digests = [message_digest(message) for message in history]
        match = self.forest.match(conversation, digests, history.__getitem__, self.lenient)
        return place_turn(self.codec, match, lambda start, stop: tuple(history[start:stop]))

    def answer(self, placement: Placement, text: str, *, cut: bool = False, stop: str | None = None) -> Node:
        ids = ids_of(text) if cut or stop else [*ids_of(text), END]
        return self.generated(placement, ids, "length" if cut else "stop", stop)[0]

    def generated(
        self, placement: Placement, ids: list[int], finish: str, stop: str | None = None
    ) -> tuple[Node, Message]:
        result = GenerateResult(
            ids=ids,
            logprobs=[-1.0] * len(ids),
            kept_mass=[1.0] * len(ids),
            finish_reason=finish,
            version_spans=(VersionSpan(start=0, length=len(ids), version=7),),
            matched_stop=stop,
        )
        sibling = self.forest.next_sibling(placement.match.request_key)
        response, reply = read_turn(self.codec, PARSER, placement, result, sibling=sibling)
        return self.forest.commit(placement, response), reply

    def reads(self, placement: Placement) -> str:
        return text_of(placement.input_ids())


def test_a_growing_history_is_one_line() -> None:
    talk = Talk()
    first = talk.answer(talk.ask(user("hi")), "yo")
    second = talk.ask(user("hi"), said("yo"), user("more"))
    assert (second.match.kind, second.match.parent) == ("append", first)
    assert talk.reads(second) == (
        f"<|im_start|>user\nhi<|im_end|>\n{OPENING}yo<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n{OPENING}"
    )
    leaf = talk.answer(second, "ok")
    assert linear_leaf(talk.forest) is leaf
    assert [node.kind for node in leaf.path()] == ["root", "observation", "response", "observation", "response"]


def test_sampled_ids_are_kept_where_the_text_could_be_encoded_otherwise() -> None:
    talk = Talk()
    ids = [twin(i) for i in ids_of("yo")]
    talk.generated(talk.ask(user("hi")), [*ids, END], "stop")
    second = talk.ask(user("hi"), said("yo"), user("more"))
    start = len(second.input_ids()) - len(second.observation_ids) - len(second.lead_ids) - len(ids) - 1
    assert second.input_ids()[start : start + len(ids)] == ids


def test_a_cut_turn_is_closed_by_the_next_message_and_exported_without_a_close() -> None:
    talk = Talk()
    cut = talk.answer(talk.ask(user("hi")), "par", cut=True)
    record = ExportRecord(name=None, node_id=cut.node_id, reward=1.0)
    sample = build_sample(talk.forest, record, session_id="s", group_id="g")
    assert text_of(sample.token_ids).endswith(OPENING + "par")
    assert sample.truncated and sample.reward == 1.0
    second = talk.ask(user("hi"), said("par"), user("go on"))
    assert text_of(second.observation_ids) == "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n"
    sample = build_sample(
        talk.forest,
        ExportRecord(name=None, node_id=talk.answer(second, "x").node_id, reward=None),
        session_id="s",
        group_id="g",
    )
    at = sample.token_ids.index(END, len(cut.path_ids()))
    assert (sample.loss_mask[at], sample.logprobs[at], sample.version_spans[2].version) == (0, 0.0, -1)


def test_a_cut_turn_goes_on_and_both_spellings_of_it_are_known() -> None:
    talk = Talk()
    talk.answer(talk.ask(user("hi")), "one ", cut=True)
    again = talk.ask(user("hi"), said("one "))
    assert again.continues and (again.observation_ids, again.lead_ids) == ((), ())
    whole, reply = talk.generated(again, [*ids_of("two"), END], "stop")
    assert reply == said("two")
    assert whole.messages == (said("one two"),)
    joined = talk.ask(user("hi"), said("one two"), user("b"))
    apart = talk.ask(user("hi"), said("one "), said("two"), user("b"))
    assert joined.match.parent is whole and apart.match.parent is whole
    assert joined.match.request_key == apart.match.request_key
    assert joined.input_ids() == apart.input_ids()
    below = talk.answer(apart, "c")
    assert talk.ask(user("hi"), said("one two"), user("b"), said("c")).match.parent is below
    assert linear_leaf(talk.forest) is below


def test_a_turn_cut_twice_is_read_as_a_whole() -> None:
    talk = Talk()
    history = (user("hi"),)
    for part in ("<think>\npl", "an\n</think>\n\nte", 'xt\n<tool_call>\n{"name": "f", "argum'):
        node, reply = talk.generated(talk.ask(*history), ids_of(part), "length")
        history = (*history, reply)
    node, reply = talk.generated(talk.ask(*history), [*ids_of('ents": {"a": 1}}\n</tool_call>'), END], "stop")
    (whole,) = node.messages
    assert (whole.reasoning, whole.content) == ("plan", "text")
    assert [(call.name, call.arguments) for call in whole.tool_calls] == [("f", '{"a": 1}')]
    assert (reply.content, reply.reasoning, reply.tool_calls) == ("", "", whole.tool_calls)
    assert talk.ask(*history, reply).match.parent is node
    assert talk.ask(user("hi"), whole).match.parent is node


def test_a_call_that_was_shown_cut_keeps_its_id() -> None:
    talk = Talk()
    cut, shown = talk.generated(talk.ask(user("a")), ids_of('<tool_call>{"name": "f", "arguments": {"a": '), "length")
    assert [call.arguments for call in shown.tool_calls] == ['{"a":']
    node, reply = talk.generated(talk.ask(user("a"), shown), [*ids_of("1}}</tool_call>"), END], "stop")
    assert node.messages[0].tool_calls == (ToolCall(id=shown.tool_calls[0].id, name="f", arguments='{"a": 1}'),)
    assert reply.tool_calls == node.messages[0].tool_calls
    assert cut.messages == (shown,)


def test_a_state_keeps_its_key_when_a_continuation_could_be_spelled_like_it() -> None:
    talk = Talk()
    cut = talk.ask(user("u"))
    rival = talk.ask(user("u"))
    talk.answer(cut, "a", cut=True)
    more = talk.ask(user("u"), said("a"))
    assert more.continues
    talk.answer(rival, "a")
    owner = talk.answer(talk.ask(user("u"), said("a")), "b")
    below = talk.answer(talk.ask(user("u"), said("a"), said("b"), user("v")), "w")
    talk.answer(more, "b")
    assert talk.ask(user("u"), said("a"), said("b")).match.parent is owner
    assert talk.ask(user("u"), said("a"), said("b"), user("v"), said("w")).match.parent is below


def test_a_new_state_takes_over_a_key_that_was_only_a_spelling() -> None:
    talk = Talk()
    cut = talk.ask(user("u"))
    rival = talk.ask(user("u"))
    talk.answer(cut, "a", cut=True)
    continued = talk.answer(talk.ask(user("u"), said("a")), "b")
    talk.answer(rival, "a")
    opened = talk.ask(user("u"), said("a"))
    assert talk.ask(user("u"), said("a"), said("b")).match.parent is continued
    owner = talk.answer(opened, "b")
    assert owner.parent is not None and not owner.parent.cut
    assert talk.ask(user("u"), said("a"), said("b")).match.parent is owner
    below = talk.answer(talk.ask(user("u"), said("a"), said("b"), user("v")), "w")
    assert owner in below.path()


def test_a_memo_forgets_what_a_new_spelling_changed() -> None:
    talk = Talk()
    talk.answer(talk.ask(user("u")), "a", cut=True)
    open_one = talk.ask(user("u"), said("a"))
    early = talk.ask(user("u"), said("a"), said("b"), user("v"))
    assert early.match.num_matched == 2
    whole = talk.answer(open_one, "b")
    late = talk.ask(user("u"), said("a"), said("b"), user("v"))
    assert (late.match.parent, late.match.num_matched) == (whole, 3)
    assert late.match.request_key == talk.ask(user("u"), said("ab"), user("v")).match.request_key


def test_the_same_request_again_is_a_sibling() -> None:
    talk = Talk()
    first = talk.answer(talk.ask(user("u")), "a")
    again = talk.ask(user("u"))
    assert (again.match.kind, again.match.is_full) == ("branch", True)
    second = talk.answer(again, "b")
    assert first.parent is second.parent
    assert talk.forest.next_sibling(again.match.request_key) == 2
    with pytest.raises(SessionFailure, match="not linear") as caught:
        linear_leaf(talk.forest)
    assert caught.value.reason == "not_linear"


def test_two_open_requests_share_one_observation() -> None:
    talk = Talk()
    first, second = talk.ask(user("u")), talk.ask(user("u"))
    one, other = talk.answer(first, "a"), talk.answer(second, "b")
    assert one.parent is other.parent
    assert [record.kind for record in node_rows(talk.forest)] == ["root", "observation", "response", "response"]


def test_equal_answers_are_two_states_and_the_newest_goes_on_until_one_was_used() -> None:
    talk = Talk()
    old = talk.answer(talk.ask(user("u")), "a")
    new, _ = talk.generated(talk.ask(user("u")), [*map(twin, ids_of("a")), END], "stop")
    assert old.key == new.key
    follow = talk.ask(user("u"), said("a"), user("v"))
    assert follow.match.parent is new
    talk.answer(follow, "b")
    newest = talk.answer(talk.ask(user("u")), "a")
    assert talk.ask(user("u"), said("a"), user("w")).match.parent is newest
    assert new in talk.ask(user("u"), said("a"), user("v"), said("b")).match.parent.path()


def test_a_complete_answer_at_the_end_opens_a_new_turn() -> None:
    talk = Talk()
    talk.answer(talk.ask(user("u")), "a")
    again = talk.ask(user("u"), said("a"))
    assert not again.continues and again.messages == ()
    assert text_of(again.lead_ids) == "\n" + OPENING
    second = talk.answer(again, "b")
    assert linear_leaf(talk.forest) is second
    record = ExportRecord(name=None, node_id=second.node_id, reward=None)
    sample = build_sample(talk.forest, record, session_id="s", group_id="g")
    assert sum(sample.loss_mask) == 4 and sample.num_turns == 2


def test_a_turn_after_a_complete_one_is_read_alone_when_it_was_cut_and_goes_on() -> None:
    talk = Talk()
    talk.answer(talk.ask(user("u")), "a")
    talk.answer(talk.ask(user("u"), said("a")), "b", cut=True)
    node, reply = talk.generated(talk.ask(user("u"), said("a"), said("b")), [*ids_of("c"), END], "stop")
    assert (node.messages, reply) == ((said("bc"),), said("c"))


def test_a_turn_that_ended_on_a_stop_text_is_closed_before_a_new_one() -> None:
    talk = Talk()
    node = talk.answer(talk.ask(user("u")), "a STOP", stop="STOP")
    assert node.messages == (said("a "),)
    assert text_of(talk.ask(user("u"), said("a ")).lead_ids) == "<|im_end|>\n" + OPENING


def test_a_turn_that_hit_its_limit_on_the_stop_id_is_complete() -> None:
    talk = Talk()
    talk.generated(talk.ask(user("u")), [*ids_of("a"), END], "length")
    again = talk.ask(user("u"), said("a"))
    assert not again.continues
    assert talk.reads(again).count("<|im_end|>") == 2


@pytest.mark.parametrize("join_tools", [True, False])
def test_tool_results_over_two_requests_are_formed_anew(join_tools: bool) -> None:
    talk = Talk(codec=CharCodec(join_tools=join_tools))
    call = '<tool_call>{"name": "f"}</tool_call>'
    asked, reply = talk.generated(talk.ask(user("u")), [*ids_of(call), END], "stop")
    history = (user("u"), reply, tool("1"))
    alone = talk.answer(talk.ask(*history), "x")
    both = talk.ask(*history, tool("2"))
    assert (both.match.parent, both.messages) == (asked, (tool("1"), tool("2")))
    between = "" if join_tools else "<|im_end|>\n<|im_start|>user\n"
    assert text_of(both.observation_ids) == f"\n<|im_start|>user\n<r>1</r>{between}<r>2</r><|im_end|>\n"
    grouped = talk.answer(both, "y")
    assert grouped.parent is not alone.parent
    assert talk.ask(*history, tool("2"), user("v")).match.parent is grouped.parent
    child = talk.ask(*history, user("v"))
    assert (child.match.parent, child.messages) == (alone.parent, (user("v"),))


@pytest.mark.parametrize("join_users", [False, True])
def test_user_after_user_hangs_where_the_tokens_allow(join_users: bool) -> None:
    talk = Talk(codec=CharCodec(join_users=join_users))
    first = talk.answer(talk.ask(user("u")), "a")
    more = talk.ask(user("u"), user("v"))
    root = talk.forest.nodes[0]
    assert more.match.parent is (root if join_users else first.parent)
    assert more.messages == ((user("u"), user("v")) if join_users else (user("v"),))
    body = "u&v" if join_users else "u<|im_end|>\n<|im_start|>user\nv"
    assert talk.reads(more) == f"<|im_start|>user\n{body}<|im_end|>\n{OPENING}"


def test_edited_assistant_text_is_an_observation() -> None:
    talk = Talk()
    talk.answer(talk.ask(user("u")), "a")
    edited = talk.ask(user("u"), said("A"), user("v"))
    leaf = talk.answer(edited, "b")
    record = ExportRecord(name=None, node_id=leaf.node_id, reward=None)
    sample = build_sample(talk.forest, record, session_id="s", group_id="g")
    assert sum(sample.loss_mask) == 2 and sample.num_turns == 1
    assert f"{OPENING}A<|im_end|>" in text_of(sample.token_ids[: sample.prompt_len])


def test_other_tools_are_another_root() -> None:
    talk = Talk()
    talk.answer(talk.ask(user("u")), "a")
    tools = ({"type": "function", "function": {"name": "f"}},)
    other = talk.ask(user("u"), conversation=Conversation(tools=tools, template_kwargs={}))
    assert (other.match.kind, other.match.parent) == ("root", None)
    talk.answer(other, "a")
    with pytest.raises(SessionFailure, match=r"2 root\(s\)"):
        linear_leaf(talk.forest)


def test_a_failed_generation_leaves_nothing() -> None:
    talk = Talk()
    talk.ask(user("u"))
    assert talk.forest.nodes == []
    talk.answer(talk.ask(user("u")), "a")
    talk.ask(user("u"), said("a"), user("v"))
    assert len(talk.forest.nodes) == 3


def test_what_is_known_as_it_stands_goes_before_a_repair() -> None:
    talk = Talk(lenient=True)
    shot = talk.answer(talk.ask(user("u"), said(" a "), user("v")), "x")
    talk.answer(talk.ask(user("u")), "a")
    again = talk.ask(user("u"), said(" a "), user("v"), said("x"), user("w"))
    assert (again.match.parent, again.match.repairs) == (shot, [])


def test_a_match_with_repairs_changes_nothing_until_it_is_committed() -> None:
    talk = Talk(lenient=True)
    first = talk.answer(talk.ask(user("u")), " a ")
    one, two = talk.ask(user("u"), said("a"), user("v")), talk.ask(user("u"), said("a"), user("v"))
    assert one.match.repairs == two.match.repairs == ["blanks"]
    assert one.match.parent is first
    talk.lenient = False
    assert talk.ask(user("u"), said("a"), user("v")).match.num_matched == 1
    talk.answer(one, "b")
    known = talk.ask(user("u"), said("a"), user("v"), said("b"), user("w"))
    assert (known.match.kind, known.match.repairs, known.match.num_matched) == ("append", [], 4)


def test_an_answer_takes_over_the_spelling_of_a_lossy_echo() -> None:
    talk = Talk(lenient=True)
    talk.answer(talk.ask(user("u")), " a ")
    talk.answer(talk.ask(user("u"), said("a"), user("v")), "b")
    exact = talk.answer(talk.ask(user("u")), "a")
    assert talk.ask(user("u"), said("a"), user("w")).match.parent is exact


def test_ever_new_ids_are_repaired_again_but_not_all_remembered() -> None:
    talk = Talk(lenient=True)
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    first = talk.answer(talk.ask(user("u")), call)
    asked = first.messages[0]
    for number in range(MAX_SPELLINGS + 8):
        echo = replace(asked, tool_calls=(replace(asked.tool_calls[0], id=f"n{number}"),))
        result = replace(tool("r"), tool_call_id=f"n{number}")
        placement = talk.ask(user("u"), echo, result)
        assert (placement.match.repairs, placement.match.is_full) == (["call_ids"], number > 0)
        talk.answer(placement, "ok")
        unknown = talk.forest.unknown_spellings(placement.match)
        assert len(unknown) == (number >= MAX_SPELLINGS)
    assert sum(node.kind == "observation" for node in talk.forest.nodes) == 2
