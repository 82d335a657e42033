"""Clients as they are, over many turns: what they lose on the way back, and what they are told when they leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from gateway_serve import Json, serving, until
from manual_clock import ManualClock

from silva.codec import TurnCodec

TURNS = 20
TOOL: Json = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def strips(message: Json, number: int) -> Json:
    return {**message, "content": (message["content"] or "").strip()}


def drops(message: Json, number: int) -> Json:
    return {key: message[key] for key in ("role", "content", "tool_calls") if key in message}


def renames(message: Json, number: int) -> Json:
    calls = [{**call, "id": f"mine-{number}"} for call in message.get("tool_calls") or ()]
    return {**message, "tool_calls": calls}


def all_of_it(message: Json, number: int) -> Json:
    return renames(drops(strips(message, number), number), number)


CLIENTS: dict[str, tuple[Callable[[Json, int], Json], set[str]]] = {
    "strips": (strips, {"blanks"}),
    "drops": (drops, {"reasoning_missing"}),
    "renames": (renames, {"call_ids"}),
    "all": (all_of_it, {"blanks", "reasoning_missing", "call_ids"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("always_new_ids", [False, True])
async def test_a_lossy_client_makes_one_linear_sample(codec: TurnCodec, client: str, always_new_ids: bool):
    lose, kinds = CLIENTS[client]
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    script = [{"text": f"<think>\nR{n}\n</think>\n\n  A{n} \n{call}"} for n in range(TURNS)]
    async with serving(codec, script, agentic_echo_match="lenient") as serve:
        turns: list[tuple[Json, str]] = []
        for turn in range(TURNS):
            history: list[Json] = [user("hi")]
            for number, (message, result) in enumerate(turns):
                echo = lose(message, number + (1000 * turn if always_new_ids else 0))
                name = echo["tool_calls"][0]["id"]
                history += [echo, {"role": "tool", "tool_call_id": name, "content": result}]
            turns.append((await serve.message("s", history, tools=[TOOL]), f"out {turn}"))
        sample = serve.sample("s")
        assert sample.num_turns == TURNS
        trained = codec.decode([t for t, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on])
        assert trained == "".join(line["text"] + "<|im_end|>" for line in script)
        records = serve.session("s").requests
        assert [record.match for record in records] == ["root", *["append"] * (TURNS - 1)]
        new_each = always_new_ids and "call_ids" in kinds
        for number, record in enumerate(records):
            assert set(record.repairs) == (kinds if number else set())
            assert len(record.repairs) == len(kinds) * (number if new_each else min(number, 1))
        counted = {name for name in serve.turns.counters if name.startswith("repair_")}
        assert counted == {f"repair_{kind}" for kind in kinds}


async def test_results_under_renamed_ids_are_rendered_under_the_given_ones(codec: TurnCodec):
    script = [{"text": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'}, {"text": "ok"}]
    async with serving(codec, script, agentic_echo_match="lenient") as serve:
        given = await serve.message("s", [user("hi")], tools=[TOOL])
        echo = renames(given, 7)
        await serve.message(
            "s", [user("hi"), echo, {"role": "tool", "tool_call_id": "mine-7", "content": "x"}], tools=[TOOL]
        )
        observation = serve.responses("s")[1].parent
        assert observation is not None
        assert observation.messages[0].tool_call_id == given["tool_calls"][0]["id"]


@pytest.mark.parametrize("wrong", ["same id twice", "result of no call", "result of the old id"])
async def test_ids_that_make_no_sense_are_another_turn(codec: TurnCodec, wrong: str):
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    async with serving(codec, [{"text": f"{call}\n{call}"}, {"text": "ok"}], agentic_echo_match="lenient") as serve:
        given = await serve.message("s", [user("hi")], tools=[TOOL])
        names = ["a", "a"] if wrong == "same id twice" else ["a", "b"]
        calls = [{**call, "id": name} for call, name in zip(given["tool_calls"], names, strict=True)]
        named = {"same id twice": "a", "result of no call": "c"}.get(wrong, given["tool_calls"][0]["id"])
        result = {"role": "tool", "tool_call_id": named, "content": "x"}
        answer = await serve.post(
            "s", {"messages": [user("hi"), {**given, "tool_calls": calls}, result], "tools": [TOOL]}
        )
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-silva-match"] == "branch"
        assert answer.headers["x-silva-repairs"] == "0"


async def test_of_two_answers_that_fit_the_newest_is_taken_and_counted(codec: TurnCodec):
    script = [{"text": "<think>\nR0\n</think>\n\nA"}, {"text": "<think>\nR1\n</think>\n\nA"}, {"text": "ok"}]
    async with serving(codec, script, agentic_echo_match="lenient") as serve:
        for _ in range(2):
            await serve.message("s", [user("hi")])
        await serve.message("s", [user("hi"), {"role": "assistant", "content": "A"}, user("go")])
        first, second, third = serve.responses("s")
        assert third.parent is not None and third.parent.parent is second and first.parent is second.parent
        assert serve.session("s").requests[-1].repairs == ["reasoning_missing", "ambiguous"]
        assert serve.turns.counters["repair_ambiguous"] == 1


async def test_a_repair_of_a_turn_that_failed_is_counted_with_the_one_that_works(codec: TurnCodec):
    script: list[Json] = [{"text": " A "}, *[{"text": "x", "error": "500"}] * 4, {"text": "ok"}]
    async with serving(codec, script, agentic_echo_match="lenient") as serve:
        await serve.message("s", [user("hi")])
        body = {"messages": [user("hi"), {"role": "assistant", "content": "A"}, user("go")]}
        failed = await serve.post("s", body)
        assert failed.status_code == 503 and serve.turns.counters["repair_blanks"] == 0
        assert (await serve.post("s", body)).headers["x-silva-repairs"] == "1"
        assert (await serve.post("s", body)).headers["x-silva-repairs"] == "0"
        assert serve.turns.counters["repair_blanks"] == 1


async def test_a_repair_that_two_turns_make_at_once_counts_once(codec: TurnCodec):
    clock = ManualClock()
    script: list[Json] = [{"text": " A "}, {"text": "ok", "delay_s": 1.0}]
    async with serving(codec, script, clock=clock, agentic_echo_match="lenient") as serve:
        await serve.message("s", [user("hi")])
        body = {"messages": [user("hi"), {"role": "assistant", "content": "A"}, user("go")]}
        both = [asyncio.create_task(serve.post("s", body)) for _ in range(2)]
        await until(lambda: len(serve.calls("s")) == 3)
        await clock.until(lambda: all(task.done() for task in both))
        assert [task.result().headers["x-silva-repairs"] for task in both] == ["1", "1"], "neither was written yet"
        assert serve.turns.counters["repair_blanks"] == 1


async def test_a_cut_turn_that_lost_its_blanks_still_goes_on(codec: TurnCodec):
    script = [{"text": " wait ", "finish_reason": "length"}, {"text": " yes "}, {"text": "ok"}]
    async with serving(codec, script, agentic_echo_match="lenient") as serve:
        one = await serve.message("s", [user("hi")])
        history = [user("hi"), {"role": "assistant", "content": one["content"].strip()}]
        two = await serve.message("s", history)
        history += [{"role": "assistant", "content": two["content"].strip()}, user("go")]
        await serve.message("s", history)
        assert len(serve.sample("s").token_ids) > 0 and serve.sample("s").num_turns == 3


LONG = "x" * 5000
CHANGES: dict[str, tuple[Callable[[Json], object], str, object, object]] = {
    "text": (lambda body: body["messages"][1].update(content="B"), "/messages/1/content", "A", "B"),
    "role": (lambda body: body["messages"][1].update(role="user"), "/messages/1/role", "assistant", "user"),
    "arguments": (
        lambda body: body["messages"][1]["tool_calls"][0]["function"].update(arguments='{"n": 2}'),
        "/messages/1/tool_calls/0/function/arguments",
        '{"n": 1}',
        '{"n": 2}',
    ),
    "name": (
        lambda body: body["messages"][1]["tool_calls"][0]["function"].update(name="g"),
        "/messages/1/tool_calls/0/function/name",
        "f",
        "g",
    ),
    "first message": (lambda body: body["messages"][0].update(content="ho"), "/messages/0/content", "hi", "ho"),
    "tool": (lambda body: body["tools"][0]["function"].update(name="g"), "/tools/0/function/name", "f", "g"),
    "fewer tools": (lambda body: body["tools"].clear(), "/tools/0", TOOL, None),
    "template argument": (
        lambda body: body.update(chat_template_kwargs={"x/y": 1}),
        "/chat_template_kwargs/x~1y",
        None,
        1,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
async def test_the_first_difference_is_on_record(codec: TurnCodec, change: str):
    apply, pointer, old, new = CHANGES[change]
    text = 'A<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
    async with serving(codec, [{"text": text}, {"text": "ok"}]) as serve:
        body: Json = {"messages": [user("hi")], "tools": [TOOL]}
        given = await serve.message("s", body["messages"], tools=[TOOL])
        again = await serve.post("s", body)
        assert again.headers["x-silva-match"] == "branch"
        if change != "first message":
            call_id = given["tool_calls"][0]["id"]
            body["messages"] += [given, {"role": "tool", "tool_call_id": call_id, "content": "x"}]
            await serve.message("s", body["messages"], tools=[TOOL])
        changed = json.loads(json.dumps(body))
        apply(changed)
        if change == "role":
            del changed["messages"][1]["tool_calls"], changed["messages"][2:]
        answer = await serve.post("s", changed)
        assert answer.status_code == 200, answer.text
        *known, last = serve.session("s").requests
        assert [record.difference for record in known] == [None] * len(known)
        assert last.difference == {"pointer": pointer, "old": old, "new": new}


async def test_long_values_are_cut_around_their_difference(codec: TurnCodec):
    async with serving(codec, [{"text": LONG + "A" + LONG}, {"text": "ok"}]) as serve:
        given = await serve.message("s", [user("hi")])
        await serve.message("s", [user("hi"), {**given, "content": LONG + "B" + LONG}, user("go")])
        difference = serve.session("s").requests[-1].difference
        assert difference is not None
        for value, letter in ((difference["old"], "A"), (difference["new"], "B")):
            assert len(value) <= 400 and letter in value and value.startswith("...x") and value.endswith("x...")
