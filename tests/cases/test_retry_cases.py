"""Field cases about repeated requests, lost clients and engine aborts."""

from __future__ import annotations

import asyncio

import openai
import pytest
from gateway_serve import Json, serving, until
from manual_clock import ManualClock
from raw_http import RawClient

from silva.gateway.turns import SamplingSettings
from silva.state.codec import TurnCodec

HI: list[Json] = [{"role": "user", "content": "hi"}]
BODY: Json = {"model": "m", "messages": HI}
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


async def test_tree_01_an_sdk_that_times_out_twice_gets_the_one_turn(codec: TurnCodec):
    clock = ManualClock()
    async with serving(codec, [{"text": "answer", "delay_s": 3.0}, {"text": "other"}], clock=clock) as serve:
        sdk = openai.AsyncOpenAI(base_url=serve.base_url, api_key="s", max_retries=2, timeout=0.3)
        asked = asyncio.create_task(
            sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        )
        await until(lambda: "s" in serve.opened and len(serve.session("s").requests) == 3)
        await clock.advance(3)
        assert (await asked).choices[0].message.content == "answer"
        assert len(serve.calls("s")) == 1
        assert [record.match for record in serve.session("s").requests] == ["root", "join", "join"]
        (node,) = serve.responses("s")
        assert node.parent is not None and node.parent.children == [node]
        # The same body again, after its reply came and without a sign of a retry, is a sample of its own.
        answer = await serve.post("s", BODY)
        assert answer.json()["choices"][0]["message"]["content"] == "other"
        assert answer.headers["x-silva-match"] == "branch" and node.parent.children[1:]
        assert serve.turns.counters["repeated_without_evidence"] == 1


@pytest.mark.parametrize("then", ["nothing", "another history", "the end"])
async def test_api_17_a_client_that_goes_away_leaves_nothing_behind(codec: TurnCodec, then: str):
    clock = ManualClock()
    async with serving(codec, [{"error": "hang"}, {"text": "fresh"}], clock=clock) as serve:
        client = RawClient(serve.server.port, "s")
        await client.send(BODY)
        await until(lambda: serve.calls("s"))
        await clock.advance(0.2)
        client.abort()
        session = serve.session("s")
        await until(lambda: session.requests[0].error_code)
        assert serve.engine.usage().num_running == 1  # a retry would join it
        if then == "nothing":
            await clock.advance(30)
        elif then == "another history":
            await serve.chat("s", [{"role": "user", "content": "other"}])
            assert serve.sample("s").num_turns == 1
        else:
            await serve.registry.finish("s", b"")
        assert serve.engine.usage().num_running == 0 and not session.open_turns
        assert session.attempts[0].error == "cancelled"
        assert session.requests[0].error_code == "client_disconnected"
        assert [node.kind for node in session.forest.nodes if node.request_id == session.requests[0].request_id] == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("abort_after", [3, 0])
async def test_api_21_an_engine_abort_is_not_told(codec: TurnCodec, path: str, abort_after: int):
    whole = "one two three four"
    ids = [*codec.encode_sampled(whole), codec.end_of_turn_id()]
    head: Json = {"ids": ids[:abort_after] + ids[:1], "abort_after": abort_after, "append_eos": False}
    script = [head, {"ids": ids[abort_after:], "append_eos": False}]
    async with serving(codec, script, sampling=SamplingSettings(max_response_len=64)) as serve:
        body: Json = {"model": "m", "max_tokens": 64}
        body |= {"input": "hi"} if "responses" in path else {"messages": HI}
        answer = await serve.post("s", body, path=path)
        assert answer.status_code == 200 and whole in answer.text and "abort" not in answer.text
        (node,) = serve.responses("s")
        assert (list(node.sampled), node.finish, node.num_aborts) == (ids, "stop", 1)
        (record,) = serve.session("s").requests
        assert record.usage is not None and record.usage.completion_tokens == len(ids)
        assert [len(call["input_ids"]) for call in serve.calls("s")] == [
            record.usage.prompt_tokens,
            record.usage.prompt_tokens + abort_after,
        ]
