"""Field cases about repeated requests, lost clients and engine aborts."""

from __future__ import annotations

import asyncio
import json
import select
import socket
from typing import Any

import openai
import pytest
from gateway_serve import Json, serving, until
from manual_clock import ManualClock
from raw_http import RawClient

from silva.codec import TurnCodec

HI: list[Json] = [{"role": "user", "content": "hi"}]
BODY: Json = {"model": "m", "messages": HI}
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


def body_of(path: str, **more: Any) -> Json:
    said: Json = {"input": "hi"} if "responses" in path else {"messages": HI}
    return {"model": "m", "max_tokens": 64, **said, **more}


@pytest.mark.slow
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


@pytest.mark.parametrize("path", PATHS)
async def test_tree_01_a_reply_that_died_on_the_wire_is_served_again(codec: TurnCodec, path: str):
    """The whole reply was written, and the connection broke before the client read it."""
    async with serving(codec, [{"text": "answer"}, {"text": "other"}]) as serve:
        data = json.dumps(body_of(path)).encode()
        head = f"POST /agentic_api{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer s\r\n"
        with socket.create_connection(("127.0.0.1", serve.server.port)) as client:
            client.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data)
            await until(lambda: select.select([client], [], [], 0)[0])
        await until(lambda: not serve.server._server.server_state.connections)
        again = await serve.post("s", body_of(path), path=path)
        assert "answer" in again.text and again.headers["x-silva-match"] == "join"
        assert len(serve.calls("s")) == 1
        (node,) = serve.responses("s")
        third = await serve.post("s", body_of(path), path=path)  # delivered in full now, and no sign of a retry
        assert "other" in third.text and third.headers["x-silva-match"] == "branch"
        assert node.parent is not None and len(node.parent.children) == 2
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
async def test_api_18_a_held_json_answer_breathes_white_space_and_a_cut_is_no_document(codec: TurnCodec, path: str):
    clock = ManualClock()
    async with serving(codec, [{"text": "late"}], clock=clock, open_sessions=False) as serve:
        session = serve.registry.open("s", "g", "train")
        told, cut = RawClient(serve.server.port, "s"), RawClient(serve.server.port, "s")
        for number, client in enumerate((told, cut), 1):
            await client.send(body_of(path), path)
            head = asyncio.create_task(client.head())
            await until(lambda number=number: len(session.requests) == number and session.requests[-1].match)
            await clock.advance(199.9)
            assert not head.done()
            await clock.advance(0.1)
            assert (await head)[0] == 200 and await client.chunk() == b" "
            await clock.advance(15)
            assert await client.chunk() == b" "
            if client is told:
                session.open_gate()
                assert "late" in json.dumps(json.loads(b"  " + await client.chunk())) and await client.chunk() == b""
                session.close_gate()
        for connection in list(serve.server._server.server_state.connections):
            connection.transport.abort()
        with pytest.raises(asyncio.IncompleteReadError):
            await cut.chunk()
        await until(lambda: session.requests[1].error_code)
        assert session.requests[1].error_code == "client_disconnected" and session.requests[1].http_status is None
        await clock.advance(30)
        assert not session.open_turns
        assert len([node for node in session.forest.nodes if node.kind == "response"]) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_api_21_without_resuming_the_turn_is_sampled_again_in_the_same_request(codec: TurnCodec, path: str):
    whole = "one two three four"
    ids = [*codec.encode_sampled(whole), codec.end_of_turn_id()]
    script: list[Json] = [{"ids": ids[:4], "abort_after": 3, "append_eos": False}, {"ids": ids, "append_eos": False}]
    async with serving(codec, script, resume_aborted=False) as serve:
        answer = await serve.post("s", body_of(path), path=path)
        assert answer.status_code == 200 and whole in answer.text and "abort" not in answer.text
        (node,) = serve.responses("s")
        assert (list(node.sampled), node.finish, node.num_aborts) == (ids, "stop", 1)
        (record,) = serve.session("s").requests
        assert record.usage is not None and record.usage.completion_tokens == len(ids)
        assert [len(call["input_ids"]) for call in serve.calls("s")] == [record.usage.prompt_tokens] * 2
        assert [attempt.num_output for attempt in serve.session("s").attempts] == [3, len(ids)]


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("abort_after", [3, 0])
async def test_api_21_an_engine_abort_is_not_told(codec: TurnCodec, path: str, abort_after: int):
    whole = "one two three four"
    ids = [*codec.encode_sampled(whole), codec.end_of_turn_id()]
    head: Json = {"ids": ids[:abort_after] + ids[:1], "abort_after": abort_after, "append_eos": False}
    script = [head, {"ids": ids[abort_after:], "append_eos": False}]
    async with serving(codec, script, rollout_max_response_len=64) as serve:
        answer = await serve.post("s", body_of(path), path=path)
        assert answer.status_code == 200 and whole in answer.text and "abort" not in answer.text
        (node,) = serve.responses("s")
        assert (list(node.sampled), node.finish, node.num_aborts) == (ids, "stop", 1)
        (record,) = serve.session("s").requests
        assert record.usage is not None and record.usage.completion_tokens == len(ids)
        assert [len(call["input_ids"]) for call in serve.calls("s")] == [
            record.usage.prompt_tokens,
            record.usage.prompt_tokens + abort_after,
        ]
