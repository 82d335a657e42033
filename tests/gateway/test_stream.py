"""Buffered SSE as a client sees it, frame by frame."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from gateway_serve import Json, serving
from manual_clock import ManualClock
from raw_http import RawClient

from silva.codec import TurnCodec

HI: list[Json] = [{"role": "user", "content": "hi"}]
TURN = '<think>\nplan\n</think>\n\nLook.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def data_frames(body: str) -> list[Any]:
    frames = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [frame if frame == "[DONE]" else json.loads(frame) for frame in frames]


async def test_one_chunk_holds_the_whole_turn_as_json_does(codec: TurnCodec):
    async with serving(codec, [{"text": TURN}]) as serve:
        whole = await serve.chat("plain", HI, logprobs=True)
        answer = await serve.post("stream", {"model": "m", "messages": HI, "stream": True, "logprobs": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.startswith(": connected\n\n")
        chunk, done = data_frames(answer.text)
        assert done == "[DONE]" and answer.text.count("[DONE]") == 1
        assert chunk["object"] == "chat.completion.chunk"
        (choice,), (expected,) = chunk["choices"], whole["choices"]
        assert choice["finish_reason"] == expected["finish_reason"] == "tool_calls"
        assert choice["logprobs"] == expected["logprobs"]
        assert chunk["usage"] == whole["usage"]
        delta, message = choice["delta"], expected["message"]
        assert [call.pop("index") for call in delta["tool_calls"]] == [0]
        assert delta["tool_calls"] == message["tool_calls"]
        for key in ("role", "content", "reasoning", "reasoning_content"):
            assert delta[key] == message[key]
        one, two = serve.responses("plain")[0], serve.responses("stream")[0]
        assert (one.ids, one.finish, one.key) == (two.ids, two.finish, two.key)


async def test_the_sdk_assembles_the_stream(codec: TurnCodec):
    async with (
        serving(codec, [{"text": TURN}]) as serve,
        serve.sdk("s").chat.completions.stream(model="m", messages=[{"role": "user", "content": "hi"}]) as stream,
    ):
        final = await stream.get_final_completion()
        message = final.choices[0].message
        assert message.content == "Look."
        assert message.tool_calls and message.tool_calls[0].function.arguments == '{"a": 1}'
        assert final.usage and final.usage.completion_tokens > 0


async def test_a_stream_breathes_every_15_seconds_until_the_turn_is_there(codec: TurnCodec):
    clock = ManualClock()
    async with serving(codec, [{"text": "ok", "delay_s": 50.0}], clock=clock) as serve:
        client = RawClient(serve.server.port, "s")
        await client.send({"messages": HI, "stream": True})
        assert (await client.head())[0] == 200
        assert await client.chunk() == b": connected\n\n"
        for _ in range(3):
            coming = asyncio.create_task(client.chunk())
            await clock.advance(14.9)
            assert not coming.done()
            await clock.advance(0.1)
            assert await coming == b": waiting\n\n"
        coming = asyncio.create_task(client.chunk())
        await clock.advance(6)
        assert b"[DONE]" in await coming
        assert await client.chunk() == b""
        client.abort()


@pytest.mark.slow
async def test_a_held_stream_breathes_too(codec: TurnCodec):
    clock = ManualClock()
    async with serving(codec, [{"text": "ok"}], clock=clock, open_sessions=False) as serve:
        session = serve.registry.open("s", "g", "train")
        client = RawClient(serve.server.port, "s")
        await client.send({"messages": HI, "stream": True})
        await client.head()
        await client.chunk()
        await clock.advance(3000)
        assert [await client.chunk() for _ in range(200)] == [b": waiting\n\n"] * 200
        session.open_gate()
        assert b"[DONE]" in await client.chunk()
        client.abort()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"messages": HI, "stream": True, "n": 2}, 400),
        ({"messages": [{"role": "user", "content": ""}], "stream": True}, 400),
        ({"messages": [{"role": "tool", "content": "x"}], "stream": True}, 400),
    ],
)
async def test_what_fails_before_generation_is_an_http_error(codec: TurnCodec, body: Json, code: int):
    async with serving(codec, [{"text": "ok"}]) as serve:
        answer = await serve.post("s", body)
        assert answer.status_code == code
        assert answer.headers["content-type"] == "application/json"


async def test_a_failure_inside_a_stream_is_an_error_frame_that_sdks_raise(codec: TurnCodec):
    async with serving(codec, [{"error": "500"}]) as serve:
        stream = await serve.sdk("s").chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="inference engine failed"):
            async for _ in stream:
                pass
        answer = await serve.post("s", {"messages": HI, "stream": True})
        error, done = data_frames(answer.text)
        assert (error["error"]["code"], done) == ("engine_error", "[DONE]")
