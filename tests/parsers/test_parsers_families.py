"""Formats of the model families: what each reads, and what all of them keep to."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.parsers import ParsedCall, ParsedTurn, TurnParser, parser_names
from silva.parsers.families import REASONING, TOOL_CALLS, detect

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "s": {"type": "string"},
                    "n": {"type": "number"},
                    "b": {"type": ["boolean", "null"]},
                    "o": {"$ref": "#/$defs/inner"},
                    "e": {"enum": [1, 2]},
                },
                "$defs": {"inner": {"anyOf": [{"type": "object"}, {"type": "array"}]}},
            },
        },
    },
)
DS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
DS_END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
PARAMETER = "<parameter=s>\n1\n</parameter>\n"


def calls_of(name: str, text: str, *, tools: object = TOOLS) -> ParsedTurn:
    return TurnParser.from_names(reasoning="none", tool_call=name).parse(text, tools=tools)  # pyright: ignore


def made(*arguments: str, content: str = "") -> ParsedTurn:
    return ParsedTurn(content=content, calls=tuple(ParsedCall(name="f", arguments=text) for text in arguments))


@pytest.mark.parametrize(
    ("name", "text", "turn"),
    [
        ("qwen3_coder", f"<tool_call>\n<function=f>\n{PARAMETER}</function>\n</tool_call>\n", made('{"s": "1"}')),
        ("qwen3_coder", f"a\n\n<function=f>\n{PARAMETER}</function>\n</tool_call>", made('{"s": "1"}', content="a")),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", made("{}")),
        ("qwen3_coder", f"<function=f>{PARAMETER}{PARAMETER}</function></tool_call>", made((PARAMETER * 2)[:-1])),
        ("qwen3_coder", f"<function=f>{PARAMETER}no</function>", made(f"{PARAMETER}no")),
        ("qwen3_coder", "<tool_call>{}</tool_call>", ParsedTurn(content="<tool_call>{}</tool_call>")),
        ("glm45", "<tool_call>f\n<arg_key>n</arg_key><arg_value>1e999</arg_value>\n</tool_call>", made('{"n": 1e999}')),
        ("glm45", "<tool_call>f\n</tool_call>", made("{}")),
        ("glm45", "<tool_call>f</tool_call>ok", made("{}", content="ok")),
        ("glm45", "<tool_call>f\n<arg_key>s", made("<arg_key>s")),
        ("glm45", "<tool_call>not a name</tool_call>", ParsedTurn(content="<tool_call>not a name</tool_call>")),
        ("minimax-m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="b">null</parameter>\n</invoke>\n'
         '<invoke name="f">\n</invoke>\n</minimax:tool_call>', made('{"b": null}', "{}")),
        ("deepseekv3", f'{DS}function<｜tool▁sep｜>f\n```json\n{{"a": "```"}}\n```{DS_END}', made('{"a": "```"}')),
        ("deepseekv3", f"{DS}function<｜tool▁sep｜>f\n```json\n{{]\n```{DS_END}", made("{]")),
        ("deepseekv31", f'hi{DS}f<｜tool▁sep｜>{{"a": 1}}{DS_END}', made('{"a": 1}', content="hi")),
        ("kimi_k2", KIMI + '{"a": "<|tool_call_end|>"}<|tool_call_end|><|tool_calls_section_end|>',
         made('{"a": "<|tool_call_end|>"}')),
        ("kimi_k2", KIMI + '{"a": ', made('{"a":')),
        ("llama3", '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}', made('{"a": 1}', "{}")),
        ("llama3", '<|python_tag|>{"name": "f", "arguments": {}}', made("{}")),
        ("llama3", "<|python_tag|>f.call(query=\"it's\", n=[1, None])", made('{"query": "it\'s", "n": [1, null]}')),
        ("llama3", "<|python_tag|>print(1)", ParsedTurn(content="<|python_tag|>print(1)")),
        ("llama3", '{"name": "f", "parameters": 1} ok', ParsedTurn(content='{"name": "f", "parameters": 1} ok')),
        ("llama3", '{"name": "Bob", "age": 3}', ParsedTurn(content='{"name": "Bob", "age": 3}')),
        ("pythonic", "[f(a='\\n\\'é', b={\"k\": (True,)}), f()]", made('{"a": "\\n\'é", "b": {"k": [true]}}', "{}")),
        ("pythonic", "<|python_start|>[f(x=-1.5)]<|python_end|>", made('{"x": -1.5}')),
        ("pythonic", "[f(g(1)), f(1)]", made("g(1)", "1")),
        ("pythonic", "[f(a=1)] is how", ParsedTurn(content="[f(a=1)] is how")),
        ("lfm2", "<|tool_call_start|>[f()] a <|tool_call_start|>[f(x=1)]<|tool_call_end|>",
         made("{}", '{"x": 1}', content=" a ")),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": 9}, {"name": "f"}]',
         made('{"a": 1}', "{}")),
        ("mistral", 'a[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]f[CALL_ID]9[ARGS]{}', made('{"a": 1}', "{}", content="a")),
        ("mistral", "[TOOL_CALLS]f[ARGS]{no}", made("{no}")),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}]', made("{}")),
        ("gpt-oss", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
         made('{"a": 1}')),
        ("gpt-oss", "<|channel|>commentary to=browser.x<|message|>{}",
         ParsedTurn(content="<|channel|>commentary to=browser.x<|message|>{}")),
    ],
)  # fmt: skip
def test_a_call_is_read_as_its_family_writes_it(name: str, text: str, turn: ParsedTurn) -> None:
    assert calls_of(name, text) == turn


def test_types_come_from_the_schema_of_the_tool_and_only_from_there() -> None:
    raw = {"s": "1", "n": "2", "b": "True", "o": "{'a': [None]}", "e": "2", "z": "3"}
    text = "<function=f>" + "".join(f"<parameter={k}>\n{v}\n</parameter>" for k, v in raw.items()) + "</function>"
    (call,) = calls_of("qwen3_coder", text).calls
    assert json.loads(call.arguments) == {"s": "1", "n": 2, "b": True, "o": {"a": [None]}, "e": 2, "z": "3"}
    (call,) = calls_of("qwen3_coder", text, tools=None).calls
    assert json.loads(call.arguments) == raw
    (call,) = calls_of("qwen3_coder", text.replace("\n2\n", "\nNaN\n").replace("True", "perhaps")).calls
    assert json.loads(call.arguments) == {**raw, "n": "NaN", "b": "perhaps", "o": {"a": [None]}, "e": "NaN"}


@pytest.mark.parametrize("name", ["llama3", "pythonic"])
def test_without_tools_nothing_that_has_no_mark_is_a_call(name: str) -> None:
    text = {"llama3": '{"name": "f", "parameters": {}}', "pythonic": "[f()]"}[name]
    assert calls_of(name, text, tools=()) == ParsedTurn(content=text)
    assert calls_of(name, text, tools=None) == made("{}")


def test_a_denied_call_stays_with_the_marks_around_it_and_the_others_go() -> None:
    text = "a<|tool_calls_section_begin|>{}<|tool_calls_section_end|>".format(
        "".join(f"<|tool_call_begin|>{name}:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>" for name in "fgf")
    )
    parser = TurnParser.from_names(reasoning="none", tool_call="kimi_k2")
    turn = parser.parse(text, is_call=lambda call: call.name != "g")
    assert [call.name for call in turn.calls] == ["f", "f"]
    assert turn.content == (
        "a<|tool_calls_section_begin|><|tool_call_begin|>g:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    )
    assert parser.parse(text, is_call=lambda call: False) == ParsedTurn(content=text)


def test_gpt_oss_messages_are_reasoning_content_and_calls_by_channel() -> None:
    text = (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>let me<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>'
    )
    both = TurnParser.from_names(reasoning="gpt-oss", tool_call="gpt-oss")
    turn = both.parse(text, opening="<|start|>assistant")
    assert turn == ParsedTurn(content="let me", reasoning="a\nb", calls=made('{"x": 1}').calls)
    assert both.parse("<|channel|>final<|message|>") == ParsedTurn(content="")
    assert both.parse("plain") == ParsedTurn(content="plain")


@pytest.mark.parametrize(
    ("name", "text", "opening", "reasoning", "content"),
    [
        ("mistral", "[THINK]a\n[/THINK]\nb", "", "a\n", "\nb"),
        ("kimi_k2", "<think>\na</think>\nb", "", "\na", "\nb"),
        ("glm45", "\n<think>a</think>\nb", "<|assistant|>", "a", "b"),
        ("glm45", "\nb", "<|assistant|>\n<think></think>", "", "b"),
        ("deepseek-r1", "a\n</think>\n\nb", "<think>\n", "a", "b"),
        ("seed_oss", "<seed:think>a</seed:think>b", "", "a", "b"),
    ],
)
def test_reasoning_loses_the_newlines_of_its_familys_template(
    name: str, text: str, opening: str, reasoning: str, content: str
) -> None:
    parser = TurnParser.from_names(reasoning=name, tool_call="none")
    assert parser.parse(text, opening=opening) == ParsedTurn(content=content, reasoning=reasoning)


PIECES = [
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=s>", "</parameter>", "f\n", "<arg_key>s",
    "</arg_key>", "<arg_value>", "</arg_value>", '<minimax:tool_call><invoke name="f">', "</invoke>", "[TOOL_CALLS]",
    "[ARGS]", "[f(", "a=1", ")", "]", ",", "'", '"', "{", "}", "\\", "\n", " ", "<", "</", "1e999", "\ud800", "\x00",
    '{"name": "f", "parameters": {}}', '{"name": "f", "arguments": {"a": "', ";", KIMI, "<|tool_call_end|>",
    "<|tool_calls_section_end|>", DS, "<｜tool▁sep｜>", "\n```json\n", "\n```", DS_END, "<|python_tag|>", "f.call(",
    "<|channel|>", "analysis", "commentary to=functions.f", "<|message|>", "<|end|>", "<|call|>", "<|start|>assistant",
    "<think>", "</think>", "[THINK]", "<|tool_call|>[", "<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">',
]  # fmt: skip
jumbled = st.lists(st.sampled_from(PIECES), max_size=16).map("".join)
MARKS = ("<", "[TOOL_CALLS]", "[f(", '{"name"', "[THINK]")


@given(jumbled, st.sampled_from(["", "<think>\n", "<|start|>assistant"]), st.sampled_from([None, (), TOOLS]))
def test_any_text_parses_in_every_format(text: str, opening: str, tools: object) -> None:
    for name in TOOL_CALLS:
        parser = TurnParser.from_names(reasoning="none", tool_call=name)
        turn = parser.parse(text, opening=opening, tools=tools)  # pyright: ignore[reportArgumentType]
        assert all(call.name.strip() for call in turn.calls)
        assert turn.calls or turn.content == text
        assert parser.parse(text, tools=tools, is_call=lambda call: False).content == text  # pyright: ignore
    for name in REASONING:
        turn = TurnParser.from_names(reasoning=name, tool_call="none").parse(text, opening=opening)
        assert not turn.calls and len(turn.reasoning) + len(turn.content) <= len(text) + text.count("<|channel|>")


@given(st.text())
def test_text_without_a_mark_is_content(text: str) -> None:
    for name in TOOL_CALLS:
        assert calls_of(name, "x" + text.replace("<", "").replace("[", "")).content == "x" + text.replace(
            "<", ""
        ).replace("[", "")


def test_names_of_the_engines_are_known_and_mean_a_format() -> None:
    names = "qwen qwen25 hermes qwen3_coder llama3 pythonic mistral glm45 glm47 kimi_k2 deepseekv3 deepseekv31 gpt-oss"
    thinkers = "qwen3 deepseek-r1 deepseek-v3 glm45 kimi kimi_k2 gpt-oss mistral minimax"
    assert set(names.split()) < set(parser_names("tool_call"))
    assert set(thinkers.split()) < set(parser_names("reasoning"))
    for name in names.split():
        assert TurnParser.from_names(reasoning="none", tool_call=name).tool_call_name in TOOL_CALLS
    assert TurnParser.from_names(reasoning="none", tool_call="qwen25").tool_call_name == "hermes"


def test_auto_looks_at_the_template_and_then_at_the_tokenizer() -> None:
    chatml = "{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}"
    assert (detect(chatml, ()).tool_calls, detect(chatml, ()).reasoning) == ("generic", "generic")
    assert detect(chatml, ["[TOOL_CALLS]", "[THINK]"]).reasoning == "mistral"
    assert detect(chatml + '<tool_call> "name"', ["[TOOL_CALLS]"]).tool_calls == "hermes"
