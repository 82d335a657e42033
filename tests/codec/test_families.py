"""Roots and deltas against full renders and encodes by transformers, for real templates."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest
from conversations import Episode, Maker, to_hf
from oracles import FAMILIES, NOW, Oracle, load
from transformers.utils import chat_template_utils

from silva.codec import Past, SampledTail
from silva.types.messages import Conversation, Message


class Reference:
    """transformers' render and ids of a conversation."""

    def __init__(self, oracle: Oracle, conversation: Conversation):
        self._tokenizer = oracle.tokenizer
        self._blank = oracle.family.blank_content
        self._kwargs: dict[str, Any] = {**oracle.family.kwargs, "tools": list(conversation.tools) or None}

    def text(self, messages: Sequence[Message], *, prompt: bool = True) -> str:
        chat = [to_hf(message, blank_content=self._blank) for message in messages]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt, **self._kwargs)
        assert isinstance(text, str)
        return text

    def ids(self, text: str) -> list[int]:
        return self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class _Frozen(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return NOW


@pytest.fixture(autouse=True)
def frozen_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss writes today's date: transformers' clock has to show the codec's."""
    monkeypatch.setattr(chat_template_utils, "datetime", _Frozen)


@pytest.fixture(scope="module", params=list(FAMILIES))
def oracle(request: pytest.FixtureRequest) -> Oracle:
    return load(request.param)


@pytest.mark.slow
def test_ids_are_those_of_the_full_render(oracle: Oracle) -> None:
    """Root and deltas of random conversations: every id, and the border before the generation prompt."""
    maker = Maker(oracle.family, seed=1)
    kept: list[bool] = []
    for _ in range(oracle.family.num_episodes):
        kept += prove_episode(oracle, maker.episode(), borders=len(kept))
    assert len(kept) > oracle.family.num_episodes
    assert any(kept) or not oracle.family.append_only


def prove_episode(oracle: Oracle, episode: Episode, *, borders: int = 0) -> list[bool]:
    """Says of each turn whether the template left all before it alone. The border is looked at in every fourth turn,
    counted from `borders`."""
    codec, reference = oracle.codec, Reference(oracle, episode.conversation)
    messages = list(episode.root)
    ids = reference.ids(reference.text(messages))
    root = codec.encode_root(messages, episode.conversation)
    assert root.observation_ids + root.opening_ids == ids
    assert len(root.observation_ids) == shared(ids, reference.ids(reference.text(messages, prompt=False)))
    kept: list[bool] = []
    for answer, new in episode.turns:
        delta = codec.encode_delta(sampled(answer, messages, len(episode.root)), new, episode.conversation)
        both = delta.observation_ids + delta.opening_ids
        messages += [answer, *new]
        text = reference.text(messages)
        now = reference.ids(text)
        at = len(now) - len(both)
        assert now[at:] == both, (codec.decode(both), text)
        assert both[0] in codec.ends.closers
        assert _ends_with(codec.decode(now[:at]), answer), (codec.decode(both), text)
        if (borders + len(kept)) % 4 == 0:
            without = reference.ids(reference.text(messages, prompt=False))
            assert at + len(delta.observation_ids) == shared(now, without)
        kept.append(now[: len(ids)] == ids)  # with the tail equal, so is the sampled part between
        assert kept[-1] or not oracle.family.append_only, text
        ids = now
    return kept


def sampled(answer: Message, before: Sequence[Message], num_given: int) -> SampledTail:
    """`answer` as a turn that was cut, behind these messages."""
    past = Past(messages=tuple(before), num_given=num_given)
    return SampledTail(message=answer, last_id=-1, cut=True, has_system=before[0].role == "system", past=lambda: past)


def _ends_with(before: str, answer: Message) -> bool:
    """What stands before a delta ends with the answer, with nothing of the new messages behind it."""
    if not answer.tool_calls:
        return before.rstrip().endswith(answer.content[-1])
    last = answer.tool_calls[-1].name
    return last in before[before.rindex(last) :] and "role" not in before[before.rindex(last) :]


@pytest.mark.slow
def test_tok_12_marker_text_never_becomes_a_control_token(oracle: Oracle) -> None:
    """The same conversation with harmless words in place of markers has the same control tokens."""
    codec, tokenizer = oracle.codec, oracle.tokenizer
    control = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    markers = tuple(sorted(set(control.values()), key=lambda token: "place" in token)[:12])
    num_markers = 0
    for seed in range(40):
        forged = Maker(oracle.family, seed=seed, inject=markers).episode()
        harmless = Maker(oracle.family, seed=seed, inject=("x",) * len(markers)).episode()
        found, expected = all_ids(oracle, forged), all_ids(oracle, harmless)
        assert [i for i in found if i in control] == [i for i in expected if i in control]
        num_markers += sum(codec.decode(found).count(text) for text in markers)
        num_markers -= sum(control.get(i) in markers for i in found)
    assert num_markers > 40, "the spellings of the markers stand in the text"


def all_ids(oracle: Oracle, episode: Episode) -> list[int]:
    """Root and deltas, joined."""
    root = oracle.codec.encode_root(episode.root, episode.conversation)
    ids, messages = root.observation_ids + root.opening_ids, list(episode.root)
    for answer, new in episode.turns:
        tail = sampled(answer, messages, len(episode.root))
        delta = oracle.codec.encode_delta(tail, new, episode.conversation)
        ids += delta.observation_ids + delta.opening_ids
        messages += [answer, *new]
    return ids


def test_a_sampled_stop_id_is_not_written_again(oracle: Oracle) -> None:
    """Closed by the model, closed by another stop id of the same meaning, and cut: one closing token in all three."""
    codec, family = oracle.codec, oracle.family
    conversation = Conversation(template_kwargs={})
    answer, new = Message(role="assistant", content="Yes."), [Message(role="user", content="go on")]

    def ids_after(last_id: int, cut: bool) -> list[int]:
        tail = SampledTail(message=answer, last_id=last_id, cut=cut, has_system=False)
        delta = codec.encode_delta(tail, new, conversation)
        assert not delta.marker_mismatch
        return delta.observation_ids + delta.opening_ids

    whole = ids_after(codec.encode_sampled("Yes.")[-1], True)
    assert ids_after(codec.end_of_turn_id(), False) == whole[1:]
    assert codec.end_of_turn_id() in codec.stop_ids
    eos = oracle.tokenizer.eos_token_id
    opener = family.template == "GLM-4.6"
    assert codec.ends.opener == opener
    assert ids_after(eos, False) == (whole if opener else whole[1:])


@pytest.mark.slow
def test_the_start_check_proves_the_tokenizer_and_fills_the_table(oracle: Oracle) -> None:
    report = oracle.codec.check()
    assert all(proof.ok for proof in report.proofs), str(report)
    assert len(report.cells) == 35
    assert report.to_json()["cells"][0]["status"] == report.cells[0].status
    assert {(c.assistant, c.tail): c.status for c in report.cells if (c.assistant, c.tail) in oracle.family.cells} == (
        oracle.family.cells
    ), str(report)
