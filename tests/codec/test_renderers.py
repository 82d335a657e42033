"""Roots and deltas against the package `renderers` on PyPI: hand-written renderers of some model families.

Per family, random conversations. The root's ids are those of the renderer's render. Behind every sampled turn, all our
ids (those before, the sampled ones, our delta) are those of the renderer's `bridge_to_next_turn`, which does not encode
sampled ids again either. The last delta is the end of the renderer's full render; where the family leaves earlier turns
as they are, that render is ours id for id. The sampled ids of an answer are those that the renderer marks as sampled.

Left out, and why:

- Whole full renders where the family drops earlier thoughts from them: our context keeps what the model sampled, so the
  two are meant to differ. Bridges cover these conversations: with `thinking_retention` "all" the renderers bridge to a
  new user message too, which they refuse otherwise.
- GLM, turns cut by the token limit: its renderers close them with <|endoftext|>, the chat template closes nothing.
- Nemotron 3, tool schemas with characters beyond ASCII: its renderer escapes them, transformers does not.
- Tools of Kimi K2 (its renderer sorts the keys of schemas, the template at hand does not, and transformers' sandbox
  stops that template at a tool call), of DeepSeek R1 and of Gemma 4 (our codec refuses the step: the templates write
  results otherwise in other histories, or into the turn of the call).
- Whole families: gpt-oss (its renderer is OpenAI's own encoder, which writes system texts, tools, results and the
  prompt otherwise than the chat template), DeepSeek V4 (its renderer follows the model's Python encoder, which sorts
  results), DeepSeek V3 and Laguna XS 2.1 (the templates at hand are other versions), Laguna XS 2 (its renderer encodes
  line ends apart that the tokenizer joins). Qwen2.5, Mistral, Phi and Gemma 2 have no renderer in the package.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from conversations import Episode, Maker, to_hf
from oracles import FAMILIES, NOW, Family, backend_of, oracle, template_of
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from silva.codec import SampledTail, TurnCodec
from silva.types.messages import Message

NUM_EPISODES = 60


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A family and the renderer class that knows it. `config`: fields of that renderer's config."""

    renderer: str
    family: Family
    config: dict[str, Any] = field(default_factory=dict)
    ascii_tools: bool = False


def _like(name: str, template: str = "", *more: str, **changes: Any) -> Family:
    """A family with another template and more special tokens."""
    base = FAMILIES[name]
    return dataclasses.replace(base, template=template or base.template, added=(*base.added, *more), **changes)


def _both(*names: str) -> tuple[str, ...]:
    return tuple(f"<{slash}{name}>" for name in names for slash in ("", "/"))


_ALL = {"thinking_retention": "all"}
_VISION = tuple(f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad"))
_RESULT = _both("tool_response")
_DEEPSEEK_CALLS = tuple(
    f"<｜tool▁{name}｜>"
    for name in (
        *(f"{what}▁{end}" for what in ("calls", "call", "outputs", "output") for end in ("begin", "end")),
        "sep",
    )
)
_MINIMAX = ("]~!b[", "]~b]", "[e~[", *_both("think", "minimax:tool_call"))
_LAGUNA = ("〈|EOS|〉", *_both("think", "assistant", "user", "system", "tool_call"))
_GEMMA_PAIRS = ("turn", "channel", "tool", "tool_call", "tool_response", "image", "audio")
_GEMMA = (
    *(f"<{name}>" for name in ("bos", "eos", "pad", "unk", "|think|", '|"|', "|image|", "|audio|", "|video|")),
    *(f"<{name}>" for pair in _GEMMA_PAIRS for name in (f"|{pair}", f"{pair}|")),
)

SUBJECTS: dict[str, Subject] = {
    "qwen3": Subject(renderer="Qwen3", family=_like("qwen3"), config=_ALL),
    "qwen3.5": Subject(renderer="Qwen35", family=_like("qwen3", "Qwen3.5-4B", *_VISION), config=_ALL),
    "glm-4.6": Subject(renderer="GLM45", family=_like("glm-4.6", "", *_RESULT), config=_ALL),
    "glm-4.7-flash": Subject(renderer="GLM5", family=_like("glm-4.6", "GLM-4.7-Flash", *_RESULT), config=_ALL),
    "llama-3.2": Subject(
        renderer="Llama3",
        family=_like("llama-3.1", "meta-llama-Llama-3.2-3B-Instruct"),
        config={"date_string": NOW.strftime("%d %b %Y")},
    ),
    "deepseek-r1": Subject(
        renderer="DeepSeekR1",
        family=_like("deepseek-r1-distill", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", *_DEEPSEEK_CALLS, kwargs={}),
        config=_ALL,
    ),
    "kimi-k2": Subject(renderer="KimiK2", family=_like("kimi-k2", "Kimi-K2-Instruct", tools=False)),
    "minimax-m2": Subject(
        renderer="MiniMaxM2",
        family=_like("qwen3", "MiniMax-M2", *_MINIMAX[:3], *_MINIMAX[5:], eos="[e~["),
        config={**_ALL, "model_identity": "You are a helpful assistant."},
    ),
    "nemotron-3": Subject(
        renderer="Nemotron3",
        family=_like("qwen3", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "<image>"),
        config=_ALL,
        ascii_tools=True,
    ),
    "laguna-s-2.1": Subject(
        renderer="LagunaS21",
        family=Family(
            template="poolside-Laguna-S-2.1",
            vocabulary="qwen2",
            bos="〈|EOS|〉",
            eos="</assistant>",
            added=_LAGUNA,
            reasoning=True,
        ),
    ),
    "gemma-4": Subject(
        renderer="Gemma4",
        family=Family(
            template="../trl/gemma4",
            vocabulary="qwen2",
            bos="<bos>",
            eos="<turn|>",
            added=_GEMMA,
            tools=False,
            reasoning=True,
            append_only=False,
        ),
        config=_ALL,
    ),
}


@functools.cache
def _package() -> Any:
    """The package, from the folder of the oracles: it is not installed."""
    sys.path.append(str(oracle("renderers/renderers/__init__.py").parents[1]))
    return importlib.import_module("renderers")


class Tokens:
    """The tokenizer as renderers want it: the bare one of the tokenizers package is faster than transformers'."""

    name_or_path = ""
    unk_token_id = None

    def __init__(self, backend: Tokenizer, eos: str):
        self._backend = backend
        self.eos_token_id = backend.token_to_id(eos)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._backend.token_to_id(token)


class Pair:
    """Our codec and the renderer, on one tokenizer."""

    def __init__(self, subject: Subject):
        package, family = _package(), subject.family
        backend = backend_of(family)
        wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=family.bos, eos_token=family.eos)
        wrapped.chat_template = template_of(family)
        self._id: Any = backend.token_to_id
        stops = [self._id(token) for token in family.stops]
        self.codec = TurnCodec(wrapped, stop_ids=stops, default_template_kwargs=family.kwargs, now=NOW)
        config = getattr(package, f"{subject.renderer}RendererConfig")(**subject.config)
        self.renderer: Any = getattr(package, f"{subject.renderer}Renderer")(Tokens(backend, family.eos), config)

    def sampled(self, before: Sequence[int], answer: Message, new: Sequence[Message]) -> list[int]:
        """What the renderer takes for sampled in an answer, with the id that ends the turn."""
        made = self.renderer.render(_chat([Message(role="user", content="hi"), answer]))
        ids = [i for i, sampled in zip(made.token_ids, made.sampled_mask, strict=True) if sampled]
        if self._id("<think>") in before[-2:] and self._id("</think>") not in ids:  # the prompt opened a thought
            ids.insert(0, self._id("</think>"))
        if self.codec.ends.opener:  # the model opens the next message itself
            ids.append(self._id(f"<|{'observation' if new[0].role == 'tool' else 'user'}|>"))
        assert ids[-1] in self.codec.stop_ids
        return ids


def _chat(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [to_hf(message, blank_content=True) for message in messages]


def _comparable(episode: Episode, subject: Subject) -> Episode:
    """The conversation without what the two are meant to write differently."""
    tools = episode.conversation.tools
    if subject.ascii_tools:
        episode.conversation = dataclasses.replace(
            episode.conversation, tools=tuple(json.loads(json.dumps(tools).replace("\\u", "u")))
        )
    return episode


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SUBJECTS))
def test_ids_are_those_of_the_renderer(name: str) -> None:
    subject = SUBJECTS[name]
    pair, maker = Pair(subject), Maker(subject.family, seed=3)
    num_turns = num_tool_turns = 0
    for number in range(NUM_EPISODES):
        episode = _comparable(maker.episode(), subject)
        _compare(pair, episode, append_only=subject.family.append_only, first_cut=number % 3)
        num_turns += len(episode.turns)
        num_tool_turns += sum(new[0].role == "tool" for _, new in episode.turns)
    assert num_turns > 2 * NUM_EPISODES
    assert num_tool_turns > 24 or not subject.family.tools


def _compare(pair: Pair, episode: Episode, *, append_only: bool, first_cut: int) -> None:
    """Every third turn is cut by the token limit, from `first_cut` on."""
    codec, renderer, tools = pair.codec, pair.renderer, list(episode.conversation.tools) or None
    messages, conversation = list(episode.root), episode.conversation
    root = codec.encode_root(messages, conversation)
    ids = root.observation_ids + root.opening_ids
    assert ids == renderer.render_ids(_chat(messages), tools=tools, add_generation_prompt=True)
    delta: list[int] = []
    for i, (answer, new) in enumerate(episode.turns):
        sampled = pair.sampled(ids, answer, new)
        cut = i % 3 == first_cut and not codec.ends.opener
        if cut:
            sampled.pop()
        has_system = messages[0].role == "system"
        tail = SampledTail(message=answer, last_id=sampled[-1], cut=cut, has_system=has_system)
        made = codec.encode_delta(tail, new, conversation)
        delta = made.observation_ids + made.opening_ids
        bridged = renderer.bridge_to_next_turn(ids, sampled, _chat(new), tools=tools)
        assert bridged is not None
        ids = ids + sampled + delta
        assert bridged.token_ids == ids, (codec.decode(sampled + delta), codec.decode(bridged.token_ids[-len(delta) :]))
        messages += [answer, *new]
    full = renderer.render_ids(_chat(messages), tools=tools, add_generation_prompt=True)
    assert full[-len(delta) :] == delta
    assert full == ids or not append_only
