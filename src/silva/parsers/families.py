"""The known formats by name, other names for them, and which of them a chat template shows. Plain data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from silva.parsers.harmony import HarmonyCalls, HarmonyReasoning
from silva.parsers.objects import LlamaObjects, MistralCalls, ObjectList, WrappedObject
from silva.parsers.parts import ReasoningFormat, ToolFormat
from silva.parsers.pythonic import PythonCalls
from silva.parsers.sections import SectionCalls
from silva.parsers.tagged import TaggedCalls
from silva.parsers.thinking import ThinkBlock

_NAME = r"(?P<name>[^<>\"\n]+)"


def _glm(gap: int) -> TaggedCalls:
    return TaggedCalls(
        open="<tool_call>",
        close="</tool_call>",
        call=r"(?P<name>[^\s<>{}\"]+)(?=\s*<|\s*\n)",
        call_close="",
        key=r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>",
        value_close="</arg_value>",
        gap=gap,
    )


def _function_tags(block: str, *, starts: tuple[str, ...] = (), newlines: int = 0) -> TaggedCalls:
    return TaggedCalls(
        open=f"<{block}>",
        close=f"</{block}>",
        call=rf"<function={_NAME}>",
        call_close="</function>",
        key=r"<parameter=(?P<key>[^<>\n]+)>",
        value_close="</parameter>",
        starts=starts,
        newlines=newlines,
        gap=2,
    )


def _invoke_tags(block: str, *, prefix: str = "", kind: str = "", gap: int = 1) -> TaggedCalls:
    return TaggedCalls(
        open=f"<{prefix}{block}>",
        close=f"</{prefix}{block}>",
        call=rf'<{prefix}invoke name="{_NAME}">',
        call_close=f"</{prefix}invoke>",
        key=rf'<{prefix}parameter name="(?P<key>[^"\n]+)"{kind}>',
        value_close=f"</{prefix}parameter>",
        gap=gap,
    )


def _dsml(block: str) -> TaggedCalls:
    return _invoke_tags(block, prefix="｜DSML｜", kind=' string="(?P<kind>true|false)"', gap=2)


def _deepseek(head: str, fence: str = "") -> SectionCalls:
    return SectionCalls(
        open="<｜tool▁calls▁begin｜>",
        close="<｜tool▁calls▁end｜>",
        call_open="<｜tool▁call▁begin｜>",
        call_close="<｜tool▁call▁end｜>",
        head=head,
        fence=fence,
    )


TOOL_CALLS: Mapping[str, ToolFormat] = {
    "generic": WrappedObject(open="<tool_call>", close="</tool_call>"),
    "hermes": WrappedObject(open="<tool_call>", close="</tool_call>"),
    "qwen3_coder": _function_tags("tool_call", starts=("<function=",), newlines=1),
    "seed_oss": _function_tags("seed:tool_call"),
    "glm45": _glm(gap=1),
    "glm47": _glm(gap=0),
    "minimax-m2": _invoke_tags("minimax:tool_call"),
    "deepseekv3": _deepseek(r"[^<\n]*<｜tool▁sep｜>\s*(?P<name>[^\s<]+)\s*\n```(?:json)?", fence="```"),
    "deepseekv31": _deepseek(r"\s*(?P<name>[^\s<]+)\s*<｜tool▁sep｜>"),
    "deepseekv32": _dsml("function_calls"),
    "deepseekv4": _dsml("tool_calls"),
    "kimi_k2": SectionCalls(
        open="<|tool_calls_section_begin|>",
        close="<|tool_calls_section_end|>",
        call_open="<|tool_call_begin|>",
        call_close="<|tool_call_end|>",
        head=r"\s*(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
    ),
    "llama3": LlamaObjects(),
    "pythonic": PythonCalls(open="<|python_start|>", close="<|python_end|>", bare=True),
    "lfm2": PythonCalls(open="<|tool_call_start|>", close="<|tool_call_end|>", bare=False),
    "mistral": MistralCalls(),
    "granite": ObjectList(open="<|tool_call|>"),
    "apriel": ObjectList(open="<tool_calls>", close="</tool_calls>", gap=1),
    "nemotron_v2": ObjectList(open="<TOOLCALL>", close="</TOOLCALL>"),
    "gpt-oss": HarmonyCalls(),
}

REASONING: Mapping[str, ReasoningFormat] = {
    "generic": ThinkBlock(inside=1, behind=2),
    "qwen3": ThinkBlock(inside=1, behind=2),
    "deepseek-r1": ThinkBlock(inside=1, behind=2),
    "deepseek-v3": ThinkBlock(),
    "glm45": ThinkBlock(behind=1),
    "glm47": ThinkBlock(),
    "kimi_k2": ThinkBlock(),
    "minimax-m2": ThinkBlock(inside=1, behind=2),
    "nemotron_3": ThinkBlock(inside=1, behind=1),
    "seed_oss": ThinkBlock(open="<seed:think>", close="</seed:think>", behind=1),
    "mistral": ThinkBlock(open="[THINK]", close="[/THINK]"),
    "gpt-oss": HarmonyReasoning(),
}

ALIASES: Mapping[str, Mapping[str, str]] = {
    "tool_call": {
        "qwen": "hermes",
        "qwen25": "hermes",
        "qwen3": "hermes",
        "qwen3_xml": "qwen3_coder",
        "step3p5": "qwen3_coder",
        "glm": "glm45",
        "minimax_m2": "minimax-m2",
        "deepseek_v3": "deepseekv3",
        "deepseek_v31": "deepseekv31",
        "deepseek_v32": "deepseekv32",
        "llama3_json": "llama3",
        "llama4_json": "llama3",
        "llama4_pythonic": "pythonic",
        "gpt_oss": "gpt-oss",
        "openai": "gpt-oss",
    },
    "reasoning": {
        "qwen3-thinking": "qwen3",
        "deepseek_r1": "deepseek-r1",
        "deepseek_v3": "deepseek-v3",
        "kimi": "kimi_k2",
        "minimax": "minimax-m2",
        "minimax_m2": "minimax-m2",
        "step3p5": "nemotron_3",
        "gpt_oss": "gpt-oss",
        "openai_gptoss": "gpt-oss",
    },
}

Kind = Literal["tool_call", "reasoning"]


def parser_names(kind: Kind) -> tuple[str, ...]:
    """The values that the option of this kind accepts."""
    known = TOOL_CALLS if kind == "tool_call" else REASONING
    return ("none", "auto", *known, *ALIASES[kind])


def family_of(kind: Kind, name: str) -> str:
    """The format's own name for any known one, `none` for that. Raises ValueError for an unknown name."""
    own = ALIASES[kind].get(name, name)
    names = parser_names(kind)
    if own not in names or own == "auto":
        raise ValueError(f"agentic_{kind}_parser is {name!r}; known parsers are {', '.join(names)}")
    return own


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """The formats that a chat template shows."""

    tool_calls: str = "generic"
    """A name in `TOOL_CALLS`."""
    reasoning: str = "generic"
    """A name in `REASONING`."""


Signs = tuple[tuple[str, tuple[str, ...]], ...]

_TOOL_SIGNS: Signs = (
    ("gpt-oss", ("<|channel|>commentary", "functions.")),
    ("kimi_k2", ("<|tool_call_argument_begin|>",)),
    ("deepseekv32", ("｜DSML｜", "function_calls>")),
    ("deepseekv4", ("｜DSML｜", "tool_calls>")),
    ("deepseekv3", ("<｜tool▁sep｜>", "```json")),
    ("deepseekv31", ("<｜tool▁sep｜>",)),
    ("minimax-m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("glm47", ("<tool_call>", "</arg_key><arg_value>")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("apriel", ("<tool_calls>[",)),
    ("apriel", ('<tool_calls>\\n{"name"',)),
    ("nemotron_v2", ("<TOOLCALL>[",)),
    ("generic", ("<function=", "</function>")),
    ("hermes", ("<tool_call>", '"name"')),
    ("mistral", ("[TOOL_CALLS]",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("granite", ("<|tool_call|>",)),
    ("pythonic", ("<|python_start|>",)),
    ("llama3", ("<|start_header_id|>ipython", '"parameters": ')),
    ("llama3", ("<|python_tag|>",)),
)
"""The first entry whose texts are all in the template's source is the family. Order matters: a template that shows JSON
inside its XML must not be taken for Hermes, and calls of a form that no parser here reads are not for Llama's."""

_REASONING_SIGNS: Signs = (
    ("gpt-oss", ("<|channel|>analysis",)),
    ("seed_oss", ("<seed:think>",)),
    ("mistral", ("[THINK]",)),
    ("kimi_k2", ("<|tool_call_argument_begin|>", "<think>")),
    ("deepseek-v3", ("｜DSML｜", "</think>")),
    ("deepseek-r1", ("<｜tool▁sep｜>", "<think>\\n")),
    ("deepseek-v3", ("<｜tool▁sep｜>", "</think>")),
    ("minimax-m2", ("<minimax:tool_call>", "</think>")),
    ("glm47", ("<think>", "</arg_key><arg_value>")),
    ("nemotron_3", ("<think>\\n", "<arg_key>")),
    ("glm45", ("<think>", "<arg_key>")),
    ("qwen3", ("<think>\\n", "</think>\\n\\n")),
    ("nemotron_3", ("<think>\\n", "</think>\\n")),
    ("qwen3", ("<think>",)),
)
"""Behind the families with marks of their own, the newlines around `<think>` make the difference."""


def detect(template: str, added_tokens: Collection[str]) -> Shown:
    """The formats that the source of a chat template shows; where it shows none, those of the tokenizer's tokens."""
    return Shown(
        tool_calls=_first(_TOOL_SIGNS, template, added_tokens),
        reasoning=_first(_REASONING_SIGNS, template, added_tokens),
    )


def _first(signs: Signs, template: str, added_tokens: Collection[str]) -> str:
    for tokens in ((), added_tokens):
        for name, texts in signs:
            if all(text in template or text in tokens for text in texts):
                return name
    return "generic"
