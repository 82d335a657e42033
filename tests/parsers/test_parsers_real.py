"""What real chat templates write of an assistant turn, read back by the parser that `auto` picks for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import oracle
from transformers.utils.chat_template_utils import render_jinja_template

from silva.parsers import TurnParser
from silva.types.messages import JsonObject

_TYPES = {
    "text": {"type": "string"},
    "days": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "nothing": {"type": "null"},
    "items": {"anyOf": [{"type": "array"}, {"type": "string"}]},
    "nested": {"$ref": "#/$defs/inner"},
}
TOOLS: tuple[JsonObject, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does it.",
            "parameters": {"type": "object", "properties": _TYPES, "$defs": {"inner": {"type": "object"}}},
        },
    }
    for name in ("get_weather", "run-code")
)


@dataclass(frozen=True, kw_only=True)
class Real:
    """A template and what it can show. `end` is the end of the turn, `reason` the key of the reasoning in a message
    ("": none), `thinks`: it needs reasoning to go on from its generation prompt."""

    tool_call: str
    reasoning: str = "generic"
    end: str = "<|im_end|>\n"
    reason: str = ""
    thinks: bool = False
    mixed: bool = True
    """Content beside calls."""
    num_calls: int = 3
    names: tuple[str, ...] = ("get_weather", "run-code")
    shown_opening: str = ""
    """What it writes before a turn in history, where that is not its generation prompt."""
    kimi_ids: bool = False
    quotes: bool = True
    """Strings in arguments may hold quotes and backslashes."""
    shows_tools: bool = True


_V31 = "<｜end▁of▁sentence｜>"
REAL: dict[str, Real] = {
    "Qwen-Qwen2.5-7B-Instruct": Real(tool_call="hermes"),
    "Qwen-Qwen3-0.6B": Real(tool_call="hermes", reasoning="qwen3", reason="reasoning_content"),
    "MiMo-VL": Real(tool_call="hermes"),
    "ibm-granite-granite-4.0": Real(tool_call="hermes", end="<|end_of_text|>\n"),
    "Bielik-11B-v3.0-Instruct": Real(tool_call="hermes", reasoning="nemotron_3", reason="reasoning_content"),
    "Qwen3-Coder": Real(tool_call="qwen3_coder"),
    "Qwen3.5-4B": Real(tool_call="qwen3_coder", reasoning="qwen3", reason="reasoning_content"),
    "StepFun3.5-Flash": Real(tool_call="qwen3_coder", reasoning="nemotron_3", reason="reasoning_content", thinks=True),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Real(
        tool_call="qwen3_coder",
        reasoning="nemotron_3",
        reason="reasoning_content",
        thinks=True,
    ),
    "ByteDance-Seed-OSS": Real(
        tool_call="seed_oss", reasoning="seed_oss", reason="reasoning_content", end="<seed:eos>"
    ),
    "GLM-4.6": Real(tool_call="glm45", reasoning="glm45", reason="reasoning_content", end=""),
    "GLM-4.7-Flash": Real(tool_call="glm47", reasoning="glm47", reason="reasoning_content", end="", thinks=True),
    "inclusionai-ling-3.0-flash": Real(
        tool_call="glm45", reasoning="glm45", reason="reasoning_content", end="<|role_end|>", thinks=True
    ),
    "MiniMax-M2": Real(
        tool_call="minimax-m2", reasoning="minimax-m2", reason="reasoning_content", end="[e~[\n", thinks=True
    ),
    "moonshotai-Kimi-K2": Real(tool_call="kimi_k2", end="<|im_end|>", kimi_ids=True),
    "deepseek-ai-DeepSeek-V3.1": Real(tool_call="deepseekv31", reasoning="deepseek-v3", end=_V31),
    "deepseek-ai-DeepSeek-V3.2": Real(
        tool_call="deepseekv32", reasoning="deepseek-v3", end=_V31, shown_opening="<｜Assistant｜></think>"
    ),
    "deepseek-ai-DeepSeek-V4": Real(tool_call="deepseekv4", reasoning="deepseek-v3", end=_V31),
    "llama-cpp-deepseek-r1": Real(
        tool_call="deepseekv3",
        reasoning="deepseek-r1",
        end=_V31,
        mixed=False,
        shows_tools=False,
        shown_opening="<｜Assistant｜>",
    ),
    "meta-llama-Llama-3.1-8B-Instruct": Real(tool_call="llama3", end="<|eot_id|>", mixed=False, num_calls=1),
    "meta-llama-Llama-3.2-3B-Instruct": Real(tool_call="llama3", end="<|eot_id|>", mixed=False, num_calls=1),
    "mistralai-Mistral-Nemo-Instruct-2407": Real(tool_call="mistral", end="</s>", mixed=False),
    "Mistral-Small-3.2-24B-Instruct-2506": Real(tool_call="mistral", end="</s>", mixed=False),
    "mistralai-Ministral-3-14B-Reasoning-2512": Real(tool_call="mistral", reasoning="mistral", end="</s>"),
    "unsloth-mistral-Devstral-Small-2507": Real(tool_call="mistral", end="</s>"),
    "MiniMax-M1": Real(tool_call="apriel", end="<end_of_sentence>\n", mixed=False),
    "LFM2.5-8B-A1B": Real(tool_call="lfm2", reasoning="qwen3", names=("get_weather",), quotes=False),
    "openai-gpt-oss-120b": Real(
        tool_call="gpt-oss", reasoning="gpt-oss", reason="thinking", end="", mixed=False, num_calls=1
    ),
}

_KINDS = {
    "text": st.text(alphabet=st.sampled_from(list("ab<>/{}[]=\"'\\ \n\t\r:,é漢🙂")), max_size=12),
    "days": st.integers(-(10**18), 10**18),
    "ratio": st.floats(allow_nan=False, allow_infinity=False, width=32),
    "flag": st.booleans(),
    "nothing": st.none(),
    "items": st.lists(st.integers() | st.text(max_size=4) | st.none() | st.booleans(), max_size=3),
    "nested": st.dictionaries(st.text(max_size=4), st.text(max_size=4) | st.lists(st.none() | st.booleans())),
}
_PLAIN = {**_KINDS, "text": st.text(alphabet=st.sampled_from(list('ab<>/{}[]=" \n\té漢🙂')), max_size=12)}
_PLAIN = {key: _PLAIN[key] for key in ("text", "days", "ratio", "flag", "nothing")}
arguments = {True: st.fixed_dictionaries({}, optional=_KINDS), False: st.fixed_dictionaries({}, optional=_PLAIN)}
words = st.text(alphabet=st.sampled_from(list("ab<>{}\"' \n🙂")), min_size=1, max_size=12).map(lambda t: f"x{t}x")


@dataclass(frozen=True)
class Turn:
    content: str
    reasoning: str
    calls: list[tuple[str, dict[str, Any]]]


def turns(real: Real) -> st.SearchStrategy[Turn]:
    made = st.lists(st.tuples(st.sampled_from(real.names), arguments[real.quotes]), max_size=real.num_calls)
    reasoning = st.just("") if not real.reason else words if real.thinks else st.just("") | words

    def with_calls(calls: list[tuple[str, dict[str, Any]]]) -> st.SearchStrategy[Turn]:
        content = words if not calls else (st.just("") | words) if real.mixed else st.just("")
        return st.builds(Turn, content, reasoning, st.just(calls))

    return made.flatmap(with_calls)


def source_of(name: str) -> str:
    return oracle(f"templates/{name}.jinja").read_text(encoding="utf-8")


def _render(name: str, messages: list[JsonObject], *, prompt: bool) -> str:
    rendered, _ = render_jinja_template(
        [messages],
        tools=list(TOOLS) if REAL[name].shows_tools else None,
        chat_template=source_of(name),
        add_generation_prompt=prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    return rendered[0]


USER: JsonObject = {"role": "user", "content": "Q"}


@cache
def opening_of(name: str) -> tuple[str, str]:
    """What stands before the generation prompt, and the prompt, or what stands for it in history."""
    before, whole = _render(name, [USER], prompt=False), _render(name, [USER], prompt=True)
    assert whole.startswith(before)
    return before, REAL[name].shown_opening or whole[len(before) :]


def sampled(name: str, turn: Turn) -> str:
    """The turn as the template writes it, without generation prompt and end of turn."""
    real = REAL[name]
    message: JsonObject = {"role": "assistant", "content": turn.content}
    if turn.reasoning:
        message[real.reason] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": f"functions.{called}:{index}" if real.kimi_ids else f"call0000{index}",
                "type": "function",
                "function": {"name": called, "arguments": made},
            }
            for index, (called, made) in enumerate(turn.calls)
        ]
    before, opening = opening_of(name)
    text = _render(name, [USER, message], prompt=False)
    start = before + opening
    assert text.startswith(start) and text.endswith(real.end), text
    return text[len(start) : len(text) - len(real.end)]


def parser_of(name: str) -> TurnParser:
    return TurnParser.from_names(reasoning="auto", tool_call="auto", template=source_of(name))


@pytest.mark.parametrize("name", list(REAL))
def test_auto_is_the_family_that_the_template_shows(name: str) -> None:
    parser = parser_of(name)
    assert (parser.tool_call_name, parser.reasoning_name) == (REAL[name].tool_call, REAL[name].reasoning)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(REAL))
def test_a_turn_as_the_template_writes_it_is_read_back(name: str) -> None:
    parser = parser_of(name)

    @settings(max_examples=15)
    @given(turns(REAL[name]))
    def check(turn: Turn) -> None:
        text = sampled(name, turn)
        parsed = parser.parse(text, opening=opening_of(name)[1], tools=TOOLS)
        assert (parsed.content, parsed.reasoning) == (turn.content, turn.reasoning), text
        assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == turn.calls, text

    check()


@pytest.mark.parametrize("name", list(REAL))
def test_a_cut_turn_keeps_the_calls_that_are_whole(name: str) -> None:
    real = REAL[name]
    made = [(real.names[0], {"text": 'a</b>\n"', "days": 3}), (real.names[-1], {}), (real.names[0], {"flag": True})]
    turn = Turn("hi" if real.mixed else "", "hm" if real.reason else "", made[: real.num_calls])
    text, parser = sampled(name, turn), parser_of(name)
    whole = parser.parse(text, opening=opening_of(name)[1], tools=TOOLS).calls
    num_whole = 0
    for end in range(len(text) + 1):
        parsed = parser.parse(text[:end], opening=opening_of(name)[1], tools=TOOLS).calls
        assert num_whole <= len(parsed) <= len(whole), text[:end]
        assert parsed[:-1] == whole[: len(parsed)][:-1], text[:end]
        assert not parsed or parsed[-1].name == whole[len(parsed) - 1].name
        num_whole = max(num_whole, len(parsed) - 1)
    assert parsed == whole and len(whole) == len(turn.calls)
