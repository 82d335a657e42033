"""Steps that a template writes otherwise in each history: formed from a render of the whole one, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from conversations import Maker
from gateway_serve import Json, serving
from oracles import WHOLE, Oracle, load
from test_families import Reference, all_ids, frozen_date, prove_episode, sampled
from tiny_templates import TURNS, tiny_codec

from silva.codec import Past, SampledTail, TurnCodec
from silva.codec.late_system import LATE_SYSTEM_MARK
from silva.turns.placing import past_of
from silva.types.errors import TransitionRefused
from silva.types.messages import Conversation, Message, ToolCall

__all__ = ["frozen_date"]

PLAIN = Conversation(template_kwargs={})
ANSWER = Message(role="assistant", content="yes")
NUMBERED = TURNS.replace("+ m.role +", "+ m.role ~ loop.index +")


def user(content: str = "hi") -> Message:
    return Message(role="user", content=content)


@pytest.fixture(scope="module", params=list(WHOLE))
def oracle(request: pytest.FixtureRequest) -> Oracle:
    return load(request.param)


@pytest.mark.slow
def test_ids_are_those_of_the_full_render(oracle: Oracle) -> None:
    maker = Maker(oracle.family, seed=1)
    num_turns = num_whole = num_impure = 0
    for _ in range(oracle.family.num_episodes):
        episode = maker.episode()
        kept = prove_episode(oracle, episode)
        num_turns, num_whole = num_turns + len(kept), num_whole + sum(kept)
        num_impure += not _served_without_past(oracle, episode)
    assert num_impure > 2, "such a template needs the history"
    assert num_whole > 0
    assert num_turns > oracle.family.num_episodes


def _served_without_past(oracle: Oracle, episode: Any) -> bool:
    has_system = episode.root[0].role == "system"
    try:
        for answer, new in episode.turns:
            cut = SampledTail(message=answer, last_id=-1, cut=True, has_system=has_system)
            oracle.codec.encode_delta(cut, new, episode.conversation)
    except TransitionRefused:
        return False
    return True


def test_tok_12_marker_text_never_becomes_a_control_token(oracle: Oracle) -> None:
    control = {i: token.content for i, token in oracle.tokenizer.added_tokens_decoder.items()}
    markers = tuple(sorted(set(control.values()))[:12])
    num_spelled = 0
    for seed in range(6):
        forged, harmless = (
            Maker(oracle.family, seed=seed, inject=x).episode() for x in (markers, ("x",) * len(markers))
        )
        found, expected = all_ids(oracle, forged), all_ids(oracle, harmless)
        assert [i for i in found if i in control] == [i for i in expected if i in control]
        num_spelled += sum(oracle.codec.decode(found).count(text) for text in markers)
        num_spelled -= sum(control.get(i) in markers for i in found)
    assert num_spelled > 10


def test_all_that_was_sampled_of_a_close_is_left_out(oracle: Oracle) -> None:
    """A sampled stop id is never written again, also where it is not the first token that the template closes with."""
    codec, new = oracle.codec, [user("go on")]
    cut = codec.encode_delta(sampled(ANSWER, [user()], 1), new, PLAIN).observation_ids
    head = cut[: codec.decode(cut).index("go on")]
    for stop in codec.stop_ids & set(head):
        tail = SampledTail(
            message=ANSWER,
            last_id=stop,
            cut=False,
            has_system=False,
            past=lambda: Past(messages=(user(),), num_given=1),
        )
        assert codec.encode_delta(tail, new, PLAIN).observation_ids == cut[cut.index(stop) + 1 :]


@pytest.mark.slow
def test_the_start_check_names_these_steps(oracle: Oracle) -> None:
    report = oracle.codec.check()
    assert report.ok, str(report)
    found = {(c.assistant, c.tail): c.status for c in report.cells if (c.assistant, c.tail) in oracle.family.cells}
    assert found == oracle.family.cells, str(report)
    reasons = [cell.reason for cell in report.cells if cell.status == "whole"]
    assert reasons and all("whole history is rendered" in reason for reason in reasons)


@pytest.fixture(scope="module")
def nemo() -> Oracle:
    return load("mistral-nemo")


@pytest.mark.slow
@pytest.mark.parametrize("leading", [[], [Message(role="system", content="Be <b>kind</b>. [INST]\n")]])
def test_tools_and_system_text_stay_where_they_were_seen_first(nemo: Oracle, leading: list[Message]) -> None:
    """Mistral Nemo's template moves both into the last user turn: a delta is that of a conversation without them."""
    for seed in range(4):
        maker = Maker(nemo.family, seed=seed, inject=("[INST]", "</s>"))
        conversation = Conversation(tools=Maker(nemo.family, seed=seed).tools(), template_kwargs={})
        given = [*leading, maker.user()]
        root = nemo.codec.encode_root(given, conversation)
        assert "AVAILABLE_TOOLS" in nemo.codec.decode(root.observation_ids)
        messages = list(given)
        for _ in range(3):
            answer, new = maker.answer(calls=False), [maker.user()]
            delta = nemo.codec.encode_delta(sampled(answer, messages, len(given)), new, conversation)
            messages += [answer, *new]
            text = Reference(nemo, PLAIN).text(messages[len(leading) :])
            assert text.endswith(nemo.codec.decode(delta.observation_ids + delta.opening_ids))


class TestProof:
    def delta(self, codec: TurnCodec, given: list[Message], rounds: Sequence[tuple[Message, list[Message]]]) -> str:
        messages, text = list(given), ""
        for answer, new in rounds:
            delta = codec.encode_delta(sampled(answer, messages, len(given)), new, PLAIN)
            messages += [answer, *new]
            text = codec.decode(delta.observation_ids + delta.opening_ids)
        return text

    def test_numbers_go_on(self) -> None:
        text = self.delta(
            tiny_codec(NUMBERED), [user()], [(ANSWER, [user()]), (ANSWER, [user("a <|end|>"), user("b")])]
        )
        assert text == "<|end|>\n<|start|>user5\na <|end|><|end|>\n<|start|>user6\nb<|end|>\n<|start|>assistant\n"

    def test_the_history_is_not_asked_for_without_need(self) -> None:
        def never() -> Past:
            raise AssertionError("the history was asked for")

        tail = SampledTail(message=ANSWER, last_id=-1, cut=True, has_system=False, past=never)
        assert tiny_codec().encode_delta(tail, [user()], PLAIN).observation_ids
        with pytest.raises(AssertionError, match="was asked for"):
            tiny_codec(NUMBERED).encode_delta(tail, [user()], PLAIN)

    @pytest.mark.parametrize(
        ("old", "new", "reason"),
        [
            ("loop.index", "loop.length", "rewrites what comes before the text of an earlier user turn"),
            ("(m.content or '')", "(m.content if loop.revindex < 4 else '')", "drops the text of an earlier user turn"),
            ("(m.content", "(messages[0].content if loop.length > 1 and loop.last else '') + (m.content", "repeats or"),
        ],
    )
    def test_a_history_that_does_not_stay_is_refused(self, old: str, new: str, reason: str) -> None:
        codec = tiny_codec(NUMBERED.replace(old, new))
        with pytest.raises(TransitionRefused, match=reason) as caught:
            self.delta(codec, [user()], [(ANSWER, [user()]), (ANSWER, [user()])])
        assert caught.value.field == "messages[0]"

    def test_reasoning_that_is_dropped_later_is_no_fault(self) -> None:
        thought = (
            "{%- if m.reasoning_content and loop.revindex < 3 %}{{- m.reasoning_content + '</think>' }}{%- endif %}"
        )
        codec = tiny_codec(NUMBERED.replace("{%- for call", thought + "{%- for call"))
        answer = Message(role="assistant", content="yes", reasoning="hm")
        assert "user7" in self.delta(codec, [user()], [(answer, [user()])] * 3)

    def test_a_template_that_looks_at_the_text_is_refused(self) -> None:
        looks = "{%- if 'weather' in m.content %}{{- '!' }}{%- endif %}"
        codec = tiny_codec(NUMBERED.replace("{%- for call", looks + "{%- for call"))
        assert "user3" in self.delta(codec, [user()], [(ANSWER, [user("fine")])])
        with pytest.raises(TransitionRefused, match="depending on what their texts say"):
            self.delta(codec, [user()], [(ANSWER, [user("weather?")])])

    def test_what_is_known_of_a_shape_is_proven_on_the_texts_of_each_history(self) -> None:
        looks = "{%- if messages[0].content == 'secret' %}{{- '!' }}{%- endif %}"
        codec = tiny_codec(NUMBERED.replace("{%- for call", looks + "{%- for call"))
        for texts in (("a", "b"), ("c <|end|>", "\nd")):
            assert f"user3\n{texts[1]}<" in self.delta(codec, [user(texts[0])], [(ANSWER, [user(texts[1])])])
        with pytest.raises(TransitionRefused, match="depending on what their texts say"):
            self.delta(codec, [user("secret")], [(ANSWER, [user("b")])])

    def test_a_late_system_message_stays_a_user_turn_in_the_history(self) -> None:
        first_only = "{%- if m.role == 'system' and not loop.first %}{{- raise_exception('first only') }}{%- endif %}"
        codec = tiny_codec(NUMBERED.replace("{{- '<|start|>' + m.role", first_only + "{{- '<|start|>' + m.role", 1))
        late = Message(role="system", content="be")
        text = self.delta(codec, [user()], [(ANSWER, [late]), (ANSWER, [user()])])
        assert text == self.delta(codec, [user()], [(ANSWER, [user(LATE_SYSTEM_MARK + "be")]), (ANSWER, [user()])])
        assert "user5" in text

    def test_what_was_never_shown_is_not_left_out(self, nemo: Oracle) -> None:
        """A system text that the template shows in a last user turn only, and that no answer has seen yet."""
        system = Message(role="system", content="Be kind.")
        call = ToolCall(id="abcd00001", name="look", arguments="{}")
        result = Message(role="tool", content="r", tool_call_id="abcd00001")
        given = [system, user(), Message(role="assistant", tool_calls=(call,)), result]
        tail = sampled(ANSWER, given, len(given))
        with pytest.raises(TransitionRefused, match="moves the text of earlier messages into the new turn"):
            nemo.codec.encode_delta(tail, [user()], PLAIN)


async def test_a_lineage_in_a_gateway_is_what_the_full_render_says() -> None:
    """The template numbers the user turns. The second answer is cut and goes on in the next request."""
    codec = tiny_codec(TURNS.replace("+ m.role +", "+ m.role ~ (loop.index if m.role == 'user' else '') +"))
    texts = ["A", "B", "C", "D"]
    async with serving(codec, [{"text": text} for text in texts]) as serve:
        history: list[Json] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
        for text in texts:
            history.append(await serve.message("s", history, max_tokens=1 if text == "B" else 9))
            if text != "B":
                history.append({"role": "user", "content": f"after {text}"})
        last = serve.responses("s")[-1]
        past = past_of(last)
        assert [m.content for m in past.messages] == ["Be kind.", "hi", "A", "after A", "BC", "after C"]
        assert past.num_given == 2
        chat = [message.to_chat() for message in (*past.messages, *last.messages)]
        assert codec.decode(last.path_ids()) + "\n" == codec.tokenizer.apply_chat_template(chat, tokenize=False)
        serve.sample("s")
