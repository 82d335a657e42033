"""Field cases of token identity that the turn codec answers alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from silva.codec import SampledTail, TurnCodec, TurnDelta
from silva.types.errors import TransitionRefused
from silva.types.messages import Conversation, Message, ToolCall

PLAIN = Conversation(template_kwargs={})
CALLS = tuple(ToolCall(id=f"call_{n}", name="look", arguments='{"a": 1}') for n in (1, 2))


def text(codec: TurnCodec, delta: TurnDelta) -> str:
    return codec.decode(delta.observation_ids + delta.opening_ids)


def after(codec: TurnCodec, answer: Message, new: list[Message], last_id: int | None = None) -> TurnDelta:
    end = codec.end_of_turn_id() if last_id is None else last_id
    return codec.encode_delta(SampledTail(message=answer, last_id=end, cut=last_id is not None), new, PLAIN)


def result(n: int, content: str = "") -> Message:
    return Message(role="tool", content=content or f"r{n}", tool_call_id=f"call_{n}")


def full(codec: TurnCodec, messages: list[Message]) -> list[int]:
    """transformers' ids of the whole conversation."""
    chat = [message.to_chat() for message in messages]
    rendered = codec.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert isinstance(rendered, str)
    return codec.tokenizer.encode(rendered, add_special_tokens=False)


def test_tok_03_the_newline_behind_the_close_is_kept_for_five_turns(codec: TurnCodec) -> None:
    asked = Message(role="user", content="weather?")
    root = codec.encode_root([asked], PLAIN)
    ids, history = root.observation_ids + root.opening_ids, [asked]
    for _ in range(5):
        answer = Message(role="assistant", content="look", tool_calls=CALLS[:1])
        sampled = full(codec, [*history, answer])[len(ids) :]
        stop = sampled.index(codec.end_of_turn_id())
        delta = after(codec, answer, [result(1, "sunny")])
        assert codec.decode(delta.observation_ids).startswith("\n")
        ids += sampled[: stop + 1] + delta.observation_ids + delta.opening_ids
        history += [answer, result(1, "sunny")]
        assert ids == full(codec, history)


def test_tok_04_one_close_whether_sampled_or_not(codec: TurnCodec) -> None:
    answer, new = Message(role="assistant", content="x"), [Message(role="user", content="go")]
    closed, cut = after(codec, answer, new), after(codec, answer, new, last_id=11)
    assert [codec.end_of_turn_id(), *closed.observation_ids] == cut.observation_ids
    assert closed.opening_ids == cut.opening_ids


def test_tok_06_a_cut_turn_is_closed_before_the_next_message(codec: TurnCodec) -> None:
    close = codec.decode([codec.end_of_turn_id()])
    cut = text(codec, after(codec, Message(role="assistant", content="a b"), [Message(role="user", content="go")], 7))
    assert cut.startswith(close + "\n") and cut.count(close) == 2


def test_tok_14_a_prefilled_opening_is_no_observation(thinking_codec: TurnCodec) -> None:
    root = thinking_codec.encode_root([Message(role="user", content="hi")], PLAIN)
    assert thinking_codec.decode(root.opening_ids).endswith("<think>\n")
    assert "<think>" not in thinking_codec.decode(root.observation_ids)
    delta = after(thinking_codec, Message(role="assistant", content="hi"), [Message(role="user", content="go")])
    assert delta.opening_ids == root.opening_ids


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_tok_15_results_are_grouped_as_the_template_does(codec: TurnCodec, order: tuple[int, int]) -> None:
    asked, answer = Message(role="user", content="q"), Message(role="assistant", content="x", tool_calls=CALLS)
    for extra in ([], [Message(role="user", content="and?")]):
        new = [*map(result, order), *extra]
        delta = after(codec, answer, new)
        ids = delta.observation_ids + delta.opening_ids
        assert full(codec, [asked, answer, *new])[-len(ids) :] == ids


def test_tok_15_a_template_that_refuses_a_result_is_a_400(tmp_path: Path) -> None:
    from chatml_dir import build_chatml_dir

    tokenizer = TurnCodec.load(build_chatml_dir(tmp_path)).tokenizer
    tokenizer.chat_template = (
        "{% if messages[-1].role == 'tool' %}{{ raise_exception('no call before') }}{% endif %}"
        + str(tokenizer.chat_template)
    )
    with pytest.raises(TransitionRefused, match="no call before") as caught:
        after(TurnCodec(tokenizer), Message(role="assistant", content="x"), [result(1)])
    assert (caught.value.status, caught.value.field) == (400, "messages[0]")


def test_tok_19_a_worked_example_is_prompt(codec: TurnCodec) -> None:
    messages = [
        Message(role="system", content="s"),
        Message(role="user", content="u"),
        Message(role="assistant", content="example"),
        Message(role="user", content="real"),
    ]
    root = codec.encode_root(messages, PLAIN)
    assert root.observation_ids + root.opening_ids == full(codec, messages)
