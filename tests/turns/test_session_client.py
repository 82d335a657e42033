"""The two doors of the turn service: a call in this process and a request over HTTP are the same turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_serve import Json, Serve, serving

from silva.codec import TurnCodec
from silva.turns.session_client import SessionClient
from silva.types.rollout import RequestRow
from silva.wire.formats import FORMATS

CALL = 'Let me see.\n<tool_call>\n{"name": "look", "arguments": {"at": 1.0}}\n</tool_call>'
SCRIPT: list[Json] = [{"text": f"<think>\nhm\n</think>\n\n{CALL}"}, {"text": "It is a fox", "finish_reason": "length"}]
LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "number"}}}}
VARYING = ("created", "created_at")


def client_of(serve: Serve, session_id: str, route: str = "chat/completions") -> SessionClient:
    live = serve.registry.find(session_id)
    assert live is not None
    return SessionClient(turns=serve.turns, live=live, form=FORMATS[route])


def chat_bodies(answer: Json | None) -> Json:
    tools = [{"type": "function", "function": LOOK}]
    messages: list[Json] = [{"role": "user", "content": "what is it?"}]
    if answer is not None:
        message = answer["choices"][0]["message"]
        call = message["tool_calls"][0]["id"]
        messages += [message, {"role": "tool", "tool_call_id": call, "content": "fur"}]
    return {"model": "m", "messages": messages, "tools": tools, "logprobs": True}


def responses_bodies(answer: Json | None) -> Json:
    items: list[Json] = [{"role": "user", "content": "what is it?"}]
    if answer is not None:
        call = next(item["call_id"] for item in answer["output"] if item["type"] == "function_call")
        items += [*answer["output"], {"type": "function_call_output", "call_id": call, "output": "fur"}]
    return {"model": "m", "input": items, "tools": [{"type": "function", **LOOK}]}


def messages_bodies(answer: Json | None) -> Json:
    tools = [{"name": "look", "input_schema": LOOK["parameters"]}]
    messages: list[Json] = [{"role": "user", "content": "what is it?"}]
    if answer is not None:
        call = next(block["id"] for block in answer["content"] if block["type"] == "tool_use")
        result = {"type": "tool_result", "tool_use_id": call, "content": "fur"}
        messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    return {"model": "m", "max_tokens": 64, "messages": messages, "tools": tools}


def plain(record: RequestRow) -> dict[str, Any]:
    """A request's record without times."""
    fields = {name: getattr(record, name) for name in RequestRow.__slots__}
    return {name: value for name, value in fields.items() if not name.endswith("_s")}


@pytest.mark.parametrize(
    ("route", "body_after"),
    [("chat/completions", chat_bodies), ("responses", responses_bodies), ("messages", messages_bodies)],
)
async def test_both_doors_give_the_same_turns(codec: TurnCodec, route: str, body_after: Any):
    seen: list[Any] = []
    for door in ("http", "in process"):
        async with serving(codec, SCRIPT) as serve:
            client = client_of(serve, "s", route)
            answer: Json | None = None
            answers: list[Json] = []
            for _ in range(2):
                body = body_after(answer)
                if door == "http":
                    reply = await serve.post("s", body, path="/v1/" + route)
                    status, answer = reply.status_code, reply.json()
                else:
                    status, answer = await client.ask(body)
                assert status == 200, answer
                answers.append({key: value for key, value in answer.items() if key not in VARYING})
            sample = serve.sample("s")
            records = [plain(record) for record in serve.session("s").requests]
            seen.append((answers, sample.token_ids, sample.loss_mask, sample.logprobs, records))
    assert seen[0] == seen[1]
    assert [record["match"] for record in seen[0][4]] == ["root", "append"]


async def test_both_doors_refuse_alike(codec: TurnCodec):
    async with serving(codec, [{"error": "500"}]) as serve:
        for body in (
            {"messages": []},
            {"messages": [{"role": "user", "content": 3}]},
            {"messages": [{"role": "user", "content": "hi"}]},  # the engine fails on it
        ):
            reply = await serve.post("http", body)
            assert (reply.status_code, reply.json()) == await client_of(serve, "inside").ask(body)
        mine, theirs = serve.session("inside").requests, serve.session("http").requests
        assert [(r.http_status, r.error_code) for r in mine] == [(r.http_status, r.error_code) for r in theirs]
        assert [r.http_status for r in mine] == [400, 400, 503]
        assert serve.forest("inside").nodes == []


async def test_the_end_of_a_session_ends_its_calls(codec: TurnCodec):
    async with serving(codec, [{"text": "late", "delay_s": 30}]) as serve:
        client = client_of(serve, "s")
        call = asyncio.create_task(client.ask({"messages": [{"role": "user", "content": "hi"}]}))
        await asyncio.wait_for(serve.session("s").first_request.wait(), 10)
        await serve.registry.end("s")
        status, document = await asyncio.wait_for(call, 10)
        assert (status, document["error"]["code"]) == (404, "session_ended")
        assert (await client.ask({}))[0] == 404
        assert [record.error_code for record in serve.session("s").requests] == ["session_ended"]


async def test_a_cancelled_caller_leaves_no_turn(codec: TurnCodec):
    async with serving(codec, [{"text": "late", "delay_s": 30}]) as serve:
        session = serve.registry.open("own", "g", "train")
        session.open_gate()
        call = asyncio.create_task(client_of(serve, "own").ask({"messages": [{"role": "user", "content": "hi"}]}))
        await asyncio.wait_for(session.first_request.wait(), 10)
        (turn,) = session.open_turns
        call.cancel()
        await asyncio.wait({call, turn})
        assert turn.cancelled() and session.open_turns == set() and session.forest.nodes == []
        assert [(record.http_status, record.error_code) for record in session.requests] == [(None, "caller_cancelled")]
