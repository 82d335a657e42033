"""Whatever a client sends over the wire, in any protocol: one answer, never a 5xx, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from gateway_serve import Json, Serve, serving, until
from hostile import BODIES, PINNED, ROUTES, Attack, Wire, attack, stray
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from silva.codec import TurnCodec

CALLED = '<think>\nR\n</think>\n\nA<tool_call>\n{"name": "f", "arguments": {"a": "\\ud800"}}\n</tool_call>'
SCRIPT: list[Json] = [
    {"text": "fine"},
    {"text": CALLED},
    {"text": "x", "finish_reason": "length"},
    {"text": '<tool_call>{"name": "f", "arguments": {"a'},
    {"text": ""},
]
TERMINAL = {
    "chat/completions": ("data: [DONE]",),
    "responses": ("event: response.completed", "event: response.incomplete", "event: response.failed"),
    "messages": ("event: message_stop", "event: error"),
}


def check_answer(request: Attack, status: int, body: bytes) -> None:
    """A whole answer in the form of its protocol."""
    assert status in (200, 400, 401, 404, 405, 413, 426), (status, body)
    if request.method == b"HEAD" or body == b"Invalid HTTP request received.":
        return
    if status == 200 and body[:1] != b"{":
        lines = body.decode().splitlines()
        assert sum(line in TERMINAL[request.route] for line in lines) == 1
        return
    answer: Any = json.loads(body)
    if status != 200:
        error = answer["error"]
        assert error["message"] and error["type"]
        assert ("messages" in request.route) == (answer.get("type") == "error" and "code" not in error), body


async def check_rest(serve: Serve) -> None:
    """Nothing hangs, every record is complete, and what was committed is sound."""
    await until(lambda: not any(session.open_turns for session in serve.opened.values()))
    assert serve.engine.usage().num_running == 0
    for name, session in serve.opened.items():
        for record in session.requests:
            assert record.http_status is not None and record.latency_s is not None
            assert (record.http_status == 200) == (record.node_id is not None) == (record.error_code is None)
        for node in serve.responses(name)[::37]:
            serve.sample(name, node)
        assert (await serve.post(name, {"messages": [{"role": "user", "content": "hi"}]})).status_code == 200


@pytest.mark.slow
def test_no_request_ever_causes_a_5xx_or_two_answers_or_none(codec: TurnCodec):
    seen: dict[tuple[str, bool], int] = {}
    with asyncio.Runner() as runner:
        gateway = serving(codec, SCRIPT)
        serve = runner.run(gateway.__aenter__())
        wire = Wire(serve.server.port)

        @settings(max_examples=700, phases=[Phase.generate])
        @given(st.integers(0, 1 << 64))
        def check(seed: int) -> None:
            dice = random.Random(seed)
            request = (stray if dice.random() < 0.1 else attack)(dice, f"s{seed % 3}")
            status, body = runner.run(asyncio.wait_for(wire.send(request), 30))
            check_answer(request, status, body)
            seen[request.route, status == 200] = seen.get((request.route, status == 200), 0) + 1

        try:
            check()
            assert all(seen[route, ok] > 15 for route in ROUTES for ok in (False, True)), seen
            runner.run(check_rest(serve))
        finally:
            wire.close()
            runner.run(gateway.__aexit__(None, None, None))


async def test_pinned_bodies_have_one_answer_each(codec: TurnCodec):
    async with serving(codec, SCRIPT) as serve:
        wire = Wire(serve.server.port)
        for route, body in PINNED:
            head = b"POST /agentic_api/%s HTTP/1.1\r\nhost: x\r\nauthorization: Bearer s\r\n" % route.encode()
            request = Attack(route=route, head=head + b"content-length: %d\r\n\r\n" % len(body), body=body)
            check_answer(request, *await wire.send(request))
        wire.close()
        await check_rest(serve)


async def test_the_bodies_that_are_bent_are_good_ones(codec: TurnCodec):
    async with serving(codec, SCRIPT) as serve:
        for route, body in BODIES.items():
            answer = await serve.post("s", body, path=f"/v1/{route}")
            assert answer.status_code == 200, answer.text


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
