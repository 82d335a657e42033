"""Calls that real chat templates write, against SGLang's parsers (package `llm-router-utils` on PyPI).

Left out, because theirs differ on purpose or by fault, while our answer is what was rendered:

- Schemas with `$ref` or `anyOf`: theirs leave such arguments strings.
- DeepSeek V3.2 and V4, strings with blanks at their ends: theirs trim them, though the tag says that it is a string.
- Mistral Nemo: theirs want a blank between the mark and the array, which the template does not write.
- Mistral Small 3.2: theirs do not know `[CALL_ID]`.
- gpt-oss: theirs do not see a call whose recipient stands before the channel, as the template writes it.
- Seed-OSS: theirs have no parser for it.
- Texts around calls: theirs trim all blanks, ours lose the template's newlines only.
"""

from __future__ import annotations

import importlib
import json
import sys
from functools import cache
from typing import Any

import pytest
from oracles import oracle
from test_parsers_real import REAL, Turn, opening_of, parser_of, sampled

from silva.types.messages import JsonObject

_TYPES = dict(
    text="string", days="integer", ratio="number", flag="boolean", nothing="null", items="array", nested="object"
)
TOOLS: tuple[JsonObject, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in _TYPES.items()}},
        },
    }
    for name in ("get_weather", "run-code")
)
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"text": "plain", "days": 3},
    {},
    {"flag": True, "ratio": 1.5},
    {"items": [1, "two"], "nested": {"a": {"b": [1]}}},
    {"text": "two\n\nlines \U0001f642 é"},
    {"text": "1"},
    {"nothing": None, "text": "<b>&amp;</b>"},
    {"text": '{"j": 1}', "ratio": 1e300},
    {"text": ""},
)
UNLIKE = ("mistralai-Mistral-Nemo-Instruct-2407", "Mistral-Small-3.2-24B-Instruct-2506", "openai-gpt-oss-120b")
UNKNOWN = ("seed_oss", "apriel")
"""Formats that it does not have in this version."""
NAMES = [name for name, real in REAL.items() if name not in UNLIKE and real.tool_call not in UNKNOWN]


@cache
def _theirs() -> tuple[Any, list[Any]]:
    folder = str(oracle("parsers/llm_router_utils/__init__.py").parents[1])
    if folder not in sys.path:
        sys.path.append(folder)
    parsers = importlib.import_module("llm_router_utils.sglang.srt.function_call.function_call_parser")
    protocol = importlib.import_module("llm_router_utils.sglang.srt.entrypoints.openai.protocol")
    return parsers.FunctionCallParser, [protocol.Tool(**tool) for tool in TOOLS]


@pytest.mark.parametrize("name", NAMES)
def test_calls_are_those_that_sglang_reads(name: str) -> None:
    real, parser, opening = REAL[name], parser_of(name), opening_of(name)[1]
    parser_class, tools = _theirs()
    for index in range(len(ARGUMENTS)):
        calls = [(real.names[i % len(real.names)], ARGUMENTS[(index + i) % len(ARGUMENTS)]) for i in range(2)]
        thought = "hm" if real.thinks else ""
        turn = Turn("", thought, calls[: real.num_calls])
        text = sampled(name, turn)
        ours = parser.parse(text, opening=opening, tools=TOOLS).calls
        rest = parser.reasoning.split(text, opening)[1] if parser.reasoning else text
        _, theirs = parser_class(tools, real.tool_call).parse_non_stream(rest)
        read = [(call.name, json.loads(call.parameters)) for call in theirs]
        assert [(call.name, json.loads(call.arguments)) for call in ours] == read == turn.calls, text
