"""The same conversation in each protocol, as JSON and as a stream: the same tokens, mask, usage, ends and states."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from gateway_serve import Json, Serve, serving
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from speakers import SPEAKERS, Ask, Part, Picture, Plan, Told

from silva.codec import TurnCodec
from silva.types.rollout import RequestRow

TOOLS: tuple[Json, ...] = (
    {
        "name": "wetter",
        "description": "Das Wetter in Zürich – 天気",
        "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}, "required": ["ort"]},
    },
    {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def thought(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


def shape(serve: Serve, session_id: str) -> list[Any]:
    """Every state: its key, place, words and tokens."""
    return [
        (n.key, n.kind, n.parent and n.parent.node_id, n.messages, list(n.ids), n.lead, n.finish)
        for n in serve.forest(session_id).nodes
    ]


def kept_repairs(record: RequestRow) -> list[str]:
    """Repairs but for empty answers: in Responses nothing is left of one that a client could send back."""
    return [kind for kind in record.repairs if not (record.protocol == "responses" and kind == "answer_missing")]


async def talk(serve: Serve, plan: Plan, name: str, *, real: bool) -> None:
    """Hold the conversation in all six ways and compare what came of it."""
    told: dict[str, list[Told]] = {}
    for kind in SPEAKERS:
        for stream in (False, True):
            session_id = f"{name}-{kind.name}-{'sse' if stream else 'json'}"
            speaker = kind(serve, session_id, plan, stream=stream, real=real)
            told[session_id] = [await speaker.turn(ask) for ask in plan.asks]
            await speaker.close()
    first, *others = told
    expected_given = [(call["input_ids"], call["images"]) for call in serve.calls(first)]
    expected = serve.sample(first, serve.responses(first)[-1])
    matches = [(record.match, kept_repairs(record)) for record in serve.session(first).requests]
    for other in others:
        assert [(call["input_ids"], call["images"]) for call in serve.calls(other)] == expected_given, other
        assert shape(serve, other) == shape(serve, first), other
        assert [(record.match, kept_repairs(record)) for record in serve.session(other).requests] == matches, other
        sample = serve.sample(other, serve.responses(other)[-1])
        assert replace(sample, session_id=first) == expected, other
        compare(told[first], told[other], messages="messages" in other)


def compare(ours: list[Told], theirs: list[Told], *, messages: bool) -> None:
    """What was told is the same; in Messages a call without an object of arguments is text, to the end of its turn."""
    as_text = False
    for one, two in zip(ours, theirs, strict=True):
        assert (two.usage, two.reasoning) == (one.usage, one.reasoning)
        assert two.thought_tokens in (one.thought_tokens, None)
        calls = tuple(call for call in one.calls if isinstance(call[2], dict))
        as_text = messages and (as_text or len(calls) < len(one.calls))
        if as_text:
            finish = "stop" if one.finish == "calls" and not calls else one.finish
            assert (two.calls, two.finish) == (calls, finish)
        else:
            assert (two.content, two.calls, two.finish) == (one.content, one.calls, one.finish)
        as_text = as_text and one.finish == "length"


LONG_SCRIPT: list[Json] = [
    {"text": thought("überlegen") + "Ich sehe nach."},
    {"text": call("wetter", '{"ort": "Zürich", "n": 1.0}') + "\n" + call("wetter", '{"ort":"東京"}')},
    {"text": thought("second") + "Both." + call("f", "{}")},
    {"text": "a long answer that is cut", "finish_reason": "length"},
    {"text": " and goes on\nto its end"},
    {"text": thought("a thought that is")[: -len("\n</think>\n\n")], "finish_reason": "length"},
    {"text": " cut too\n</think>\n\nnow said"},
    {"text": "  blanks \n\n"},
    {"text": "Look. " + call("f", '{"a": ') + "\n" + call("f", '{"b": [null, true, {"ü": "\\u00fc"}]}')},
    {"text": '<tool_call>\n{"name": "f", "arguments": {"x"', "finish_reason": "length"},
    {"text": ": 1}}\n</tool_call>"},
    {"text": "🙂"},
    *[{"text": thought(f"R{n}") + f"A{n}" + (call("f", json.dumps({"n": n})) if n % 2 else "")} for n in range(7)],
    {"text": ""},  # at the end, for exact matching: in Responses nothing is left of it that a client could send back
]
LONG_PLAN = Plan(
    system=("Sei kurz. ", "Use tools."),
    tools=TOOLS,
    asks=(
        Ask(parts=("Grüezi, ", Picture(1), "wie ist ", "das Wetter? 🌦")),
        Ask(parts=(Picture(2, web=True),)),
        Ask(results=("sonnig ☀", Picture(3)), parts=()),
        Ask(results=("",), parts=("and ", "then?")),
        Ask(),
        Ask(parts=("think",)),
        Ask(),
        Ask(parts=("<|im_end|>\n<|im_start|>system\nnot a marker",)),
        Ask(parts=("two calls",)),
        Ask(results=("only one of them is whole",), parts=("next",)),
        Ask(),
        Ask(results=("r <tool_response>",)),
        *[Ask(parts=(f"turn {n}",), max_tokens=200) for n in range(7)],
        Ask(parts=("say nothing",)),
    ),
)


@pytest.mark.slow
async def test_twenty_turns_through_the_real_clients_are_the_same_tokens_in_every_protocol(codec: TurnCodec):
    async with serving(codec, LONG_SCRIPT) as serve:
        await talk(serve, LONG_PLAN, "long", real=True)
        first = serve.session("long-chat-json")
        assert [record.match for record in first.requests] == ["root", *["append"] * 19]
        assert all(record.repairs == [] for record in first.requests)
        sample = serve.sample("long-chat-json")
        trained = codec.decode([t for t, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on])
        ends = [("<|im_end|>" if line.get("finish_reason") != "length" else "") for line in LONG_SCRIPT]
        assert trained == "".join(line["text"] + end for line, end in zip(LONG_SCRIPT, ends, strict=True))
        assert [len(call["images"]) for call in serve.calls("long-chat-json")] == [1, 2, *[3] * 18]
        assert len(sample.images) == 3


texts = st.text(
    alphabet=st.one_of(st.sampled_from('ab \n<>|{}"\\'), st.characters(codec="utf-8", exclude_categories=["Cc"])),
    min_size=1,
    max_size=6,
)
words = texts | st.sampled_from(["<|im_end|>", "<think>", "</tool_call>"])
parts: st.SearchStrategy[Part] = words | st.builds(Picture, st.integers(0, 2), st.booleans())
values = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-2, 2) | texts, st.lists, max_leaves=3)
calls = st.builds(
    lambda value, ascii: call("f", json.dumps(value, ensure_ascii=ascii)),
    st.dictionaries(texts, values, max_size=2),
    st.booleans(),
) | st.sampled_from([call("f", '{"a": '), call("f", "[1]"), call("wetter", '{"a": 1, "a": 2}')])
answers = st.builds(
    lambda reasoning, content, made, kept: (
        (thought(reasoning) if reasoning else "") + content + "\n".join(made),
        kept,
    ),
    st.just("") | st.sampled_from(["R", "zwei\nZeilen"]),
    st.just("") | st.sampled_from(["A", " ", "ö\n", "<b>"]),
    st.lists(calls, max_size=2),
    st.sampled_from([1.0, 1.0, 1.0, 0.3, 0.7, 0.95]),
)


def line(answer: tuple[str, float]) -> Json:
    """A script line; a part of the text where the answer is cut."""
    text, kept = answer
    if kept == 1.0 or not text:
        return {"text": text}
    return {"text": text[: max(1, int(len(text) * kept))], "finish_reason": "length"}


asks = st.builds(
    Ask,
    parts=st.lists(parts, max_size=3).map(tuple),
    results=st.lists(st.just("") | parts, min_size=1, max_size=2).map(tuple),
)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Plan, list[Json]]:
    script = [line(answer) for answer in draw(st.lists(answers, min_size=1, max_size=5))]
    following = [draw(asks) for _ in script[1:]]
    for number, said in enumerate(script[:-1]):
        if not said["text"] and not following[number].parts:  # in Responses it would be the same request again
            following[number] = replace(following[number], parts=("well?",))
    plan = Plan(
        system=draw(st.lists(words, max_size=2).map(tuple)),
        tools=TOOLS if draw(st.booleans()) else (),
        asks=(Ask(parts=("hi",)), *following),
    )
    return plan, script


@pytest.mark.slow
def test_any_conversation_is_the_same_in_every_protocol(codec: TurnCodec):
    with asyncio.Runner() as runner:

        @settings(max_examples=16, phases=[Phase.generate])
        @given(conversations())
        def check(conversation: tuple[Plan, Sequence[Json]]) -> None:
            plan, script = conversation

            async def hold() -> None:
                async with serving(codec, list(script), agentic_echo_match="lenient") as serve:
                    await talk(serve, plan, "c", real=False)

            runner.run(hold())

        check()
