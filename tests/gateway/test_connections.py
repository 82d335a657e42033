"""Odd but lawful HTTP, requests that their session outlives or does not, and our own mistakes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from gateway_serve import Json, serving, until
from manual_clock import ManualClock

from silva.codec import TurnCodec
from silva.gateway.protocol import MAX_HEAD_BYTES, MAX_QUEUED

HI: list[Json] = [{"role": "user", "content": "hi"}]
BODY = json.dumps({"messages": HI}).encode()


def post(*headers: str, body: bytes = BODY, version: str = "1.1") -> bytes:
    lines = [f"POST /agentic_api/v1/chat/completions HTTP/{version}", "host: x", "authorization: Bearer s", *headers]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


async def answers(port: int, data: bytes, count: int, *, piece: int | None = None) -> list[tuple[int, Any]]:
    """Status and JSON body of `count` answers to what is sent (in pieces of some bytes)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for start in range(0, len(data), piece or len(data)):
        writer.write(data[start : start + (piece or len(data))])
        if piece:
            await asyncio.sleep(0)
    found: list[tuple[int, Any]] = []
    for _ in range(count):
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)).decode().lower().split("\r\n")
        length = next(int(line.split(":")[1]) for line in head if line.startswith("content-length"))
        found.append((int(head[0].split()[1]), json.loads(await reader.readexactly(length))))
    writer.close()
    return found


@pytest.mark.parametrize("piece", [None, 7])
@pytest.mark.parametrize(
    "offer",
    [
        ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQBAAAAAAIAAAAA"),
        ("connection: upgrade", "upgrade: websocket"),
        ("connection: keep-alive, Upgrade", "upgrade: anything/9"),
    ],
)
async def test_an_offer_to_switch_protocols_is_declined_and_the_request_answered(
    codec: TurnCodec, offer: tuple[str, ...], piece: int | None
):
    async with serving(codec, [{"text": "one"}, {"text": "two"}]) as serve:
        found = await answers(serve.server.port, post(*offer) + post(), 2, piece=piece)
        assert [status for status, _ in found] == [200, 200]
        assert [answer["choices"][0]["message"]["content"] for _, answer in found] == ["one", "two"]


@pytest.mark.parametrize("filler", [b"x-a: b\r\n", b"b"])
async def test_a_head_without_end_ends_its_connection(codec: TurnCodec, filler: bytes):
    async with serving(codec, [{"text": "one"}]) as serve:
        big = post("x-big: " + "b" * (MAX_HEAD_BYTES // 2))
        found = await answers(serve.server.port, big + big + post(), 3)  # each head counts for itself
        assert [status for status, _ in found] == [200, 200, 200]
        reader, writer = await asyncio.open_connection("127.0.0.1", serve.server.port)
        start = post().split(b"content-length")[0]
        writer.write(start + (filler * MAX_HEAD_BYTES)[: MAX_HEAD_BYTES + 1 - len(start)])
        assert (await reader.readline()).split()[1] == b"400"
        assert b"larger than" in await reader.read()
        assert len(serve.session("s").requests) == 3
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_of_http_1_0_gets_no_chunks(codec: TurnCodec, stream: bool):
    clock = ManualClock()
    async with serving(codec, [{"text": "late", "delay_s": 250.0}], clock=clock) as serve:
        reader, writer = await asyncio.open_connection("127.0.0.1", serve.server.port)
        writer.write(post(body=json.dumps({"messages": HI, "stream": stream}).encode(), version="1.0"))
        whole = asyncio.create_task(reader.read())
        await clock.until(whole.done, step_s=10)
        head, body = whole.result().split(b"\r\n\r\n")
        assert b"transfer-encoding" not in head and b"connection: close" in head
        if stream:
            assert body.startswith(b": connected\n\n: waiting\n\n") and body.endswith(b"\n\ndata: [DONE]\n\n")
        else:
            assert body.startswith(b"    {")
            assert json.loads(body)["choices"][0]["message"]["content"] == "late"
        writer.close()


async def test_the_loss_of_a_connection_is_seen_though_more_requests_lie_behind(codec: TurnCodec):
    clock = ManualClock()
    async with serving(codec, [{"error": "hang"}], clock=clock) as serve:
        _, writer = await asyncio.open_connection("127.0.0.1", serve.server.port)
        writer.write(post() * 3)
        await until(lambda: serve.calls("s"))
        writer.transport.abort()
        await until(lambda: serve.session("s").requests[0].error_code)
        await clock.advance(30)
        assert serve.engine.usage().num_running == 0 and not serve.session("s").open_turns
        (record,) = serve.session("s").requests  # the others were never begun
        assert (record.error_code, record.http_status) == ("client_disconnected", None)


async def test_requests_that_are_sent_in_one_go_are_answered_in_order(codec: TurnCodec):
    script: list[Json] = [{"text": str(number)} for number in range(3)]
    async with serving(codec, script) as serve:
        found = await answers(serve.server.port, post() * 3, 3)
        assert [answer["choices"][0]["message"]["content"] for _, answer in found] == ["0", "1", "2"]


async def test_a_connection_with_many_requests_behind_the_one_being_answered_is_not_read(codec: TurnCodec):
    async with serving(codec, [{"error": "hang"}]) as serve:
        _, writer = await asyncio.open_connection("127.0.0.1", serve.server.port)
        writer.write(post() * MAX_QUEUED)
        await until(lambda: serve.calls("s"))
        (protocol,) = serve.server._server.server_state.connections
        await until(lambda: len(protocol.pipeline) == MAX_QUEUED - 1)
        for _ in range(50):  # the answer that begins reads the connection once more
            await asyncio.sleep(0)
        assert not protocol.flow.read_paused
        writer.write(post())
        await until(lambda: len(protocol.pipeline) == MAX_QUEUED)
        assert protocol.flow.read_paused
        writer.transport.abort()


async def test_what_is_no_request_does_not_break_into_an_answer(codec: TurnCodec):
    clock = ManualClock()
    async with serving(codec, [{"error": "hang"}], clock=clock) as serve:
        reader, writer = await asyncio.open_connection("127.0.0.1", serve.server.port)
        writer.write(post(body=json.dumps({"messages": HI, "stream": True}).encode()))
        begun = await reader.readuntil(b": connected\n\n\r\n")
        writer.write(b"no request\r\n\r\n")
        assert begun.count(b"HTTP/1.1") == 1 and await reader.read() == b""
        await until(lambda: serve.session("s").requests[0].error_code == "client_disconnected")
        writer.close()


@pytest.mark.slow
async def test_requests_whose_answer_breaks_off_have_whole_records_and_no_second_answer(codec: TurnCodec):
    async with serving(codec, [{"error": "hang"}]) as serve:
        streams = [await asyncio.open_connection("127.0.0.1", serve.server.port) for _ in range(4)]
        for number, ((_, writer), data) in enumerate(zip(streams, [post()[:-5], post()] * 2, strict=True), start=1):
            writer.write(data)
            await until(lambda number=number: "s" in serve.opened and len(serve.session("s").requests) == number)
        await until(lambda: len(serve.calls("s")) == 2)
        for _, writer in streams[:2]:
            writer.transport.abort()
        records = serve.session("s").requests
        await until(lambda: all(record.error_code for record in records[:2]))
        await serve.server.close()
        assert [await reader.read() for reader, _ in streams[2:]] == [b"", b""]
        assert [r.error_code for r in records] == ["client_disconnected"] * 2 + ["server_stopped"] * 2
        assert all(r.http_status is None and r.latency_s is not None for r in records)
        assert serve.engine.usage().num_running == 0 and not serve.session("s").open_turns


async def test_a_websocket_is_refused_at_once(codec: TurnCodec):
    head = b"GET /agentic_api/v1/responses HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n"
    async with serving(codec, [{"text": "one"}]) as serve:
        ((status, answer),) = await answers(serve.server.port, head, 1)
        assert status == 426 and answer["error"]["code"] == "no_websocket"


async def test_a_session_that_ends_while_a_request_comes_in_settles_it(codec: TurnCodec):
    async with serving(codec, [{"text": "one"}]) as serve:
        data = post()
        reader, writer = await asyncio.open_connection("127.0.0.1", serve.server.port)
        writer.write(data[:-5])
        await until(lambda: "s" in serve.opened)
        session = serve.session("s")
        await serve.registry.finish("s", b"")
        (record,) = session.requests
        assert (record.http_status, record.error_code) == (404, "session_ended") and record.latency_s is not None
        before = record.latency_s
        writer.write(data[-5:])
        assert (await reader.readline()).split()[1] == b"404"
        assert record.latency_s == before  # what was handed to the ledger does not change any more
        writer.close()


async def test_no_request_opens_a_session_while_all_are_being_ended(codec: TurnCodec):
    async with serving(codec, [{"text": "one"}]) as serve:
        await serve.chat("s", HI)
        closing = asyncio.create_task(serve.registry.close())
        late = await serve.post("late", {"messages": HI})
        assert [session.session_id for session in await closing] == ["s"]
        assert (late.status_code, late.json()["error"]["code"]) == (404, "session_ended")
        assert (await serve.post("later", {"messages": HI})).status_code == 404
        assert list(serve.opened) == ["s"] and serve.registry.live_ids == []


async def test_a_lost_client_of_an_ended_session_changes_nothing(codec: TurnCodec):
    async with serving(codec, [{"text": "one"}]) as serve:
        _, writer = await asyncio.open_connection("127.0.0.1", serve.server.port)
        writer.write(post()[:-5])
        await until(lambda: "s" in serve.opened)
        (record,) = serve.session("s").requests
        await serve.registry.finish("s", b"")
        writer.transport.abort()
        await serve.chat("t", HI)
        assert record.error_code == "session_ended"


async def test_a_mistake_of_our_own_is_told_in_the_protocols_shape_and_recorded(
    codec: TurnCodec, monkeypatch: pytest.MonkeyPatch
):
    async with serving(codec, [{"text": "one"}]) as serve:

        async def broken(*_: object) -> None:
            raise IndexError("list index out of range")

        with monkeypatch.context() as patch:
            patch.setattr(serve.turns, "prepare", broken)
            answer = await serve.post("s", {"messages": HI})
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error" and "index" not in answer.text
        await serve.chat("s", HI)
        assert [(r.http_status, r.error_code) for r in serve.session("s").requests] == [
            (500, "internal_error"),
            (200, None),
        ]


@pytest.mark.parametrize("logprob", [-1e39, 5.0])
async def test_log_probs_that_are_none_are_an_engine_fault(codec: TurnCodec, logprob: float):
    good = {"text": "fine"}
    async with serving(codec, [{"ids": [5, 6], "logprobs": [logprob, -0.1], "append_eos": False}, good]) as serve:
        await serve.chat("s", HI)
        assert serve.turns.counters["engine_fault"] == 1
        assert list(serve.responses("s")[0].sampled) == [*codec.encode_sampled("fine"), codec.end_of_turn_id()]
        assert "log-probs from" in (serve.session("s").attempts[0].error or "")
