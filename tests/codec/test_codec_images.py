"""Images in real vision templates: roots and deltas against transformers' full render, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from typing import Any

import pytest
from conversations import Maker
from oracles import FAMILIES, NOW, Family, backend_of, oracle
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from silva.codec import Past, SampledTail, TurnCodec
from silva.types.errors import TransitionRefused
from silva.types.messages import Conversation, Image, JsonObject, Message, Part, Role, join_texts, text_of

_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_QWEN, _MISTRAL, _GEMMA = FAMILIES["qwen3"], FAMILIES["mistral-nemo"], FAMILIES["gemma-2"]

VISION: dict[str, tuple[Family, str, tuple[Role, ...]]] = {
    # name: the family, what stands for an image, and in messages of which roles
    "qwen3-vl": (
        replace(_QWEN, template="trl/qwen3_vl", added=(*_QWEN.added, *_VISION), append_only=True, reasoning=False),
        "<|vision_start|><|image_pad|><|vision_end|>",
        ("user", "tool"),
    ),
    "qwen2.5-vl": (
        replace(_QWEN, template="trl/qwen2_5_vl", added=(*_QWEN.added, *_VISION), tools=False, reasoning=False),
        "<|vision_start|><|image_pad|><|vision_end|>",
        ("user", "system"),
    ),
    "gemma-3": (
        replace(_GEMMA, template="trl/gemma3", added=(*_GEMMA.added, "<start_of_image>")),
        "<start_of_image>",
        ("user",),
    ),
    "mistral-small": (
        replace(
            _MISTRAL,
            template="templates/Mistral-Small-3.2-24B-Instruct-2506",
            added=(*_MISTRAL.added, "[IMG]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[CALL_ID]", "[ARGS]"),
            tools=False,
        ),
        "[IMG]",
        ("user",),
    ),
    # one that reads lists of parts only, and writes the images of a message before its texts
    "llava": (
        replace(_MISTRAL, template="trl/llava_next", added=(*_MISTRAL.added, "<image>"), tools=False),
        "<image>",
        ("user",),
    ),
}
PLAIN = Conversation(template_kwargs={})


class _Frozen(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return NOW


@pytest.fixture(autouse=True)
def frozen_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistral's template writes today's date: transformers' clock has to show the codec's."""
    monkeypatch.setattr(chat_template_utils, "datetime", _Frozen)


@cache
def load(name: str) -> tuple[TurnCodec, PreTrainedTokenizerFast]:
    family = VISION[name][0]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend_of(family), bos_token=family.bos, eos_token=family.eos)
    tokenizer.chat_template = oracle(f"{family.template}.jinja").read_text(encoding="utf-8")
    stops = [tokenizer.convert_tokens_to_ids(token) for token in family.stops]
    return TurnCodec(tokenizer, stop_ids=stops, now=NOW), tokenizer


def full_ids(name: str, messages: Sequence[Message], tools: Sequence[JsonObject] = ()) -> list[int]:
    """What transformers makes of the whole conversation, each content a list of parts as processors give it."""
    _, tokenizer = load(name)
    chat: list[JsonObject] = []
    for message in messages:
        turn = message.to_chat()
        parts: Sequence[Part] = message.parts or (message.content,)
        if message.parts or name == "llava":
            turn["content"] = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts
            ]
        for call in turn.get("tool_calls", ()):
            turn["content"] = message.content
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        chat.append(turn)
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, tools=list(tools) or None)
    assert isinstance(text, str)
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


class Painter:
    """Puts images between the texts of some messages."""

    def __init__(self, seed: int):
        self._rng = random.Random(seed)
        self.num = 0

    def paint(self, message: Message, roles: Sequence[Role]) -> Message:
        if message.role not in roles or self._rng.random() < 0.3:
            return message
        parts: list[Part] = [message.content[: len(message.content) // 2], message.content[len(message.content) // 2 :]]
        for _ in range(self._rng.randint(1, 3)):
            parts.insert(self._rng.randint(0, len(parts)), Image(digest=f"{self.num:064x}"))
            self.num += 1
        joined = join_texts(parts)
        return replace(message, content=text_of(joined), parts=joined)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(VISION))
def test_ids_are_those_of_the_full_render(name: str) -> None:
    family, mark, roles = VISION[name]
    codec, _ = load(name)
    mark_ids = codec.encode_sampled(mark)
    maker, painter = Maker(family, seed=3), Painter(3)
    num_turns = num_images = 0
    for _ in range(5):
        episode = maker.episode()
        tools = episode.conversation.tools
        messages = [painter.paint(message, roles) for message in episode.root]
        ids = full_ids(name, messages, tools)
        root = codec.encode_root(messages, episode.conversation)
        assert root.observation_ids + root.opening_ids == ids, codec.decode(ids)
        for answer, plain in episode.turns:
            new = [painter.paint(message, roles) for message in plain]
            cut = SampledTail(message=answer, last_id=-1, cut=True, has_system=messages[0].role == "system")
            delta = codec.encode_delta(cut, new, episode.conversation)
            both = delta.observation_ids + delta.opening_ids
            messages += [answer, *new]
            now = full_ids(name, messages, tools)
            assert now[-len(both) :] == both, (codec.decode(both), codec.decode(now))
            count = sum(both[at : at + len(mark_ids)] == mark_ids for at in range(len(both)))
            assert count == sum(len(message.images) for message in new)
            num_images += count
            num_turns += 1
    assert num_turns > 8 and num_images > 8


def picture(*parts: Part, role: Role = "user", **fields: Any) -> Message:
    return Message(role=role, content=text_of(parts), parts=parts, **fields)


@pytest.mark.parametrize("name", list(VISION))
def test_text_that_spells_an_image_is_text(name: str) -> None:
    codec, tokenizer = load(name)
    mark = VISION[name][1]
    image = Image(digest="0" * 64)
    root = codec.encode_root([picture(f"see {mark}", image, f"{mark} and {mark}")], PLAIN)
    harmless = codec.encode_root([picture("see x", image, "x and x")], PLAIN)
    control = set(tokenizer.added_tokens_decoder)
    found, expected = ([i for i in r.observation_ids if i in control] for r in (root, harmless))
    assert found == expected
    assert codec.decode(root.observation_ids).count(mark) == 4


def test_roles_without_a_place_for_images_are_known() -> None:
    for name, (family, _, roles) in VISION.items():
        codec, _ = load(name)
        shown = {role for role in ("user", "tool", "system") if codec.shows_images(role, PLAIN)}
        assert set(roles) <= shown <= {*roles, *([] if family.tools else ["tool"])}, name


def test_an_image_without_a_place_is_a_word() -> None:
    codec, tokenizer = load("qwen3-vl")
    assert codec.check().to_json()["features"]["shows images of"] == ["user", "tool"]
    image = Image(digest="0" * 64)
    system, user = picture("be ", image, "brief", role="system"), Message(role="user", content="hi")
    worded = Message(role="system", content="be <image>brief")
    assert codec.encode_root([system, user], PLAIN) == codec.encode_root([worded, user], PLAIN)
    assert "be <image>brief" in tokenizer.decode(codec.encode_root([system, user], PLAIN).observation_ids)


def test_images_that_a_template_numbers_are_refused_where_the_number_would_be_wrong() -> None:
    codec, _ = load("qwen3-vl")
    numbered = Conversation(template_kwargs={"add_vision_id": True})
    one = picture("look", Image(digest="0" * 64))
    assert "Picture 1: " in codec.decode(codec.encode_root([one], numbered).observation_ids)
    with pytest.raises(TransitionRefused, match="cannot be matched to their marks"):
        codec.encode_root([one, one], numbered)
    tail = SampledTail(message=Message(role="assistant", content="a"), last_id=-1, cut=True, has_system=False)
    with pytest.raises(TransitionRefused, match="other histories") as caught:
        codec.encode_delta(tail, [one], numbered)
    assert caught.value.field == "messages[0]"
    codec.encode_delta(tail, [Message(role="user", content="look")], numbered)
    words = Message(role="user", content="hi")
    seen = replace(tail, past=lambda: Past(messages=(one,), num_given=1))
    with pytest.raises(TransitionRefused, match="cannot be matched to their marks"):
        codec.encode_delta(seen, [one], numbered)
    none_seen = replace(tail, past=lambda: Past(messages=(words,), num_given=1))
    assert "Picture 1: " in codec.decode(codec.encode_delta(none_seen, [one], numbered).observation_ids)
