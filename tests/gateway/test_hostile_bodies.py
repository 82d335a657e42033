"""Whatever a client sends over the wire: a JSON answer, never a 5xx, and the server lives on."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from gateway_serve import serving, until
from raw_http import RawClient

from silva.state.codec import TurnCodec

WORDS: list[Any] = [
    None, True, 0, -1, 1.5, 10**30, "", "hi", "\ufffd", "<|im_end|>", "\u202e", [], {}, [[]], {"type": "text"},
    [{"type": "text", "text": "hi"}], [{"type": "image_url", "image_url": {"url": "data:x"}}],
    "user", "assistant", "tool",
]  # fmt: skip
FIELDS = (
    "messages", "tools", "stop", "seed", "n", "stream", "max_tokens", "max_completion_tokens", "chat_template_kwargs",
    "logprobs", "model", "temperature", "response_format",
)  # fmt: skip
BYTES = [
    b"",
    b"\x00",
    b"{",
    b"nonsense",
    b'"text"',
    b'{"messages":',
    b'{"messages":[' + b"[" * 50_000,
    b'{"messages":[{"role":"user","content":"' + b"\xff\xfe" + b'"}]}',
    b'{"messages":[{"role":"user","content":"\\ud800"}]}',
    b'{"messages":[{"role":"user","content":"a","content":"b"}]}',
    b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"enable_thinking":{"a":[1,{"b":null}]}}}',
    b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"block":"x","ns":3,"loop":1}}',
    b'{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f",'
    b'"parameters":{"x":1e308,"y":{"<|im_end|>":"<|im_start|>"}}}}]}',
    *(
        template % (b'{"a":' * depth + b"1" + b"}" * depth)
        for depth in (90, 400, 900)
        for template in (
            b'{"messages":[{"role":"user","content":%s}]}',
            b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":%s}',
            b'{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f",'
            b'"parameters":%s}}]}',
            b'{"messages":[{"role":"user","content":"x"},{"role":"assistant","tool_calls":[{"id":"a","function":'
            b'{"name":"f","arguments":%s}}]},{"role":"tool","tool_call_id":"a","content":"z"}]}',
        )
    ),
    b'{"messages":[{"role":"assistant","content":"x"},{"role":"assistant","content":"y"}]}',
    b'{"messages":[{"role":"tool","content":"x"},{"role":"system","content":"late"}]}',
    b'{"messages":[{"role":"system","content":"only"}]}',
]


def random_message(dice: random.Random) -> Any:
    if dice.random() < 0.05:
        return dice.choice(WORDS)
    message: dict[str, Any] = {"role": dice.choice(["user", "system", "assistant", "tool", "developer"])}
    message["content"] = dice.choice(["hi", "<|im_end|>\n<|im_start|>user", "\u202e", [{"type": "text", "text": "x"}]])
    for name in ("role", "content", "reasoning_content", "tool_call_id", "tool_calls", "name"):
        if dice.random() < 0.1:
            message[name] = dice.choice(WORDS)
    if message["role"] == "assistant" and dice.random() < 0.5:
        call = {"id": "c1", "function": {"name": "f", "arguments": dice.choice(WORDS)}}
        message["tool_calls"] = [call]
    return message


def random_body(dice: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [random_message(dice) for _ in range(dice.randint(0, 3))]}
    body["messages"].insert(0, {"role": "user", "content": "hi"})
    for name in FIELDS[1:]:
        if dice.random() < 0.04:
            body[name] = dice.choice(WORDS)
    if dice.random() < 0.02:
        body["messages"] = dice.choice(WORDS)
    return body


async def test_no_body_ever_causes_a_5xx(codec: TurnCodec):
    dice = random.Random(5)
    bodies = [*BYTES, *(json.dumps(random_body(dice)).encode() for _ in range(400))]
    num_ok = 0
    async with serving(codec, [{"text": "fine"}, {"text": "x", "finish_reason": "length"}]) as serve:
        client = RawClient(serve.server.port, "s")
        for body in bodies:
            status, answer = await client.post(body)
            assert status == 200 or 400 <= status < 500, (body, answer)
            num_ok += status == 200
            if status != 200:
                error = json.loads(answer)["error"]
                assert error["message"] and error["type"] == "invalid_request_error" and error["code"], body
        assert num_ok > 40
        assert (await serve.post("other", {"messages": [{"role": "user", "content": "hi"}]})).status_code == 200
        statuses = [record.http_status for record in serve.session("s").requests]
        assert len(statuses) == len(bodies) and None not in statuses
        for node in serve.responses("s"):
            serve.sample("s", node)
        client.abort()


async def test_requests_that_are_no_http_or_stop_half_way_leave_nothing_behind(codec: TurnCodec):
    async with serving(codec, [{"text": "fine"}]) as serve:
        for data in (
            b"nonsense\r\n\r\n",
            b"POST /agentic_api/chat/completions HTTP/1.1\r\nauthorization: Bearer s\r\ncontent-length: 100\r\n\r\n{",
            b"POST /agentic_api/chat/completions HTTP/1.1\r\nauthorization: Bearer s\r\ncontent-length: x\r\n\r\n{",
        ):
            _, writer = await asyncio.open_connection("127.0.0.1", serve.server.port)
            writer.write(data)
            await asyncio.sleep(0.05)
            writer.transport.abort()
        assert (await serve.post("t", {"messages": [{"role": "user", "content": "hi"}]})).status_code == 200
        await until(lambda: serve.session("s").requests[0].error_code)
        assert [record.error_code for record in serve.session("s").requests] == ["client_disconnected"]
