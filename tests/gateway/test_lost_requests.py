"""Requests that get lost, repeated or overtaken at the worst moments: one turn, one answer each, whole records."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from gateway_serve import Json, Serve, serving, until
from manual_clock import ManualClock
from raw_http import RawClient

from silva.codec import TurnCodec
from silva.gateway.held import MAX_ENDED
from silva.turns import turn_service as turns

HI: list[Json] = [{"role": "user", "content": "hi"}]
BODY: Json = {"model": "m", "messages": HI}
OTHER: Json = {"model": "m", "messages": [{"role": "user", "content": "something else"}]}
RETRY = {"x_stainless_retry_count": "1"}


def content(answer: Json) -> str:
    return answer["choices"][0]["message"]["content"]


class SlowCodec:
    """Holds the n-th piece of work that a gateway gives to its codec thread until it is let go."""

    def __init__(self, serve: Serve, monkeypatch: pytest.MonkeyPatch, nth: int):
        self.going = asyncio.Event()
        self.num_seen, self._nth, self._work = 0, nth, serve.turns._off_loop
        monkeypatch.setattr(serve.turns, "_off_loop", self._hold)

    async def _hold(self, work: Callable[[], Any]) -> Any:
        self.num_seen += 1
        if self.num_seen == self._nth:
            await self.going.wait()
        return await self._work(work)

    @property
    def holds(self) -> bool:
        return self.num_seen >= self._nth and not self.going.is_set()


async def lost(serve: Serve, client: RawClient) -> None:
    num = sum(record.error_code is not None for record in serve.session("s").requests)
    client.abort()
    await until(lambda: sum(record.error_code is not None for record in serve.session("s").requests) > num)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["placed", "written"])
@pytest.mark.parametrize("then", ["asked again", "joined first", "asked for something else", "the end"])
async def test_clients_that_go_while_a_turn_is_in_the_thread(
    codec: TurnCodec, monkeypatch: pytest.MonkeyPatch, when: str, then: str
):
    monkeypatch.setattr(turns, "MAX_INLINE_IDS", 0)
    clock = ManualClock()
    async with serving(codec, [{"text": "one"}, {"text": "two"}], clock=clock) as serve:
        slow = SlowCodec(serve, monkeypatch, nth=1 if when == "placed" else 2)
        client = RawClient(serve.server.port, "s")
        await client.send(BODY)
        await until(lambda: slow.holds)
        session = serve.session("s")
        if then == "the end":
            again = asyncio.create_task(serve.post("s", BODY, **RETRY))
            await until(lambda: len(session.requests) == 2)
            await serve.registry.finish("s", b"")
            assert (await client.head())[0] == (await again).status_code == 404
            expected = ("session_ended", "session_ended"), 0
        elif then == "joined first":
            stream, late = (
                asyncio.create_task(serve.post("s", BODY | more, **RETRY)) for more in ({"stream": True}, {})
            )
            await until(lambda: len(session.requests) == 3)
            await lost(serve, client)
            late.cancel()
            await until(lambda: sum(record.error_code is not None for record in session.requests) == 2)
            slow.going.set()
            assert "one" in (await stream).text
            expected = ("client_disconnected", *sorted([None, "client_disconnected"], key=str)), 1
        else:
            await lost(serve, client)
            again = asyncio.create_task(serve.post("s", BODY if then == "asked again" else OTHER))
            await until(lambda: len(session.requests) == 2)
            slow.going.set()
            assert content((await again).json()) == ("one" if then == "asked again" or when == "placed" else "two")
            expected = ("client_disconnected", None), 1
        codes, num_responses = expected
        assert sorted(map(str, (record.error_code for record in session.requests))) == sorted(map(str, codes))
        assert all(record.latency_s is not None for record in session.requests)
        assert len([node for node in session.forest.nodes if node.kind == "response"]) == num_responses
        assert serve.engine.usage().num_running == 0 and not session.open_turns


async def test_a_session_that_ends_as_a_turn_is_written_records_what_was_ended_turns(
    codec: TurnCodec, monkeypatch: pytest.MonkeyPatch
):
    clock = ManualClock()
    async with serving(codec, [{"text": "one", "delay_s": 3.0}], clock=clock) as serve:
        commit, ending = serve.turns.commit, list[asyncio.Task[Any]]()

        async def commit_and_end(*given: Any) -> Any:
            reply = await commit(*given)
            ending.append(asyncio.create_task(serve.registry.finish("s", b"")))
            return reply

        monkeypatch.setattr(serve.turns, "commit", commit_and_end)
        first = asyncio.create_task(serve.post("s", BODY))
        await until(lambda: serve.calls("s"))
        again = asyncio.create_task(serve.post("s", BODY, **RETRY))
        session = serve.session("s")
        await until(lambda: len(session.requests) == 2)
        await clock.until(lambda: first.done() and again.done())
        await asyncio.gather(*ending)
        for answer, record in zip((first.result(), again.result()), session.requests, strict=True):
            assert answer.status_code == record.http_status == 200 and record.error_code is None
            assert answer.headers["x-silva-match"] == record.match
            assert (record.node_id, record.finish_reason, record.latency_s) == (2, "stop", 3.0)


async def test_an_answer_that_was_cut_behind_its_head_keeps_its_error_in_the_records(
    codec: TurnCodec, caplog: pytest.LogCaptureFixture
):
    clock = ManualClock()
    script: list[Json] = [{"error": "500", "delay_s": 250.0}]
    async with serving(codec, script, clock=clock, retry_delays_s=()) as serve:
        client = RawClient(serve.server.port, "s")
        await client.send(BODY)
        await until(lambda: serve.calls("s"))
        rest = asyncio.create_task(client.rest())
        await clock.until(rest.done, step_s=20)
        assert not rest.result().endswith(b"0\r\n\r\n")
        (record,) = serve.session("s").requests
        assert (record.http_status, record.error_code, record.latency_s) == (503, "engine_error", 250.0)
        assert "without completing response" not in caplog.text, "we cut it; the server finds no half answer"


async def test_a_retry_with_another_nonce_is_the_same_request(codec: TurnCodec):
    clock = ManualClock()

    def body(nonce: str) -> Json:
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"}
        return {"max_tokens": 9, "system": [header, {"type": "text", "text": "You are."}], "messages": HI}

    script: list[Json] = [{"text": "one", "delay_s": 3.0}, {"text": "two"}]
    async with serving(codec, script, clock=clock) as serve:
        client = RawClient(serve.server.port, "s")
        await client.send(body("a"), "/v1/messages")
        await until(lambda: serve.calls("s"))
        await lost(serve, client)
        await clock.advance(3)
        again = await serve.post("s", body("b"), path="/v1/messages")
        assert again.headers["x-silva-match"] == "join" and "one" in again.text
        other = await serve.post("s", body("c") | {"system": "You are not."}, path="/v1/messages", **RETRY)
        assert other.headers["x-silva-match"] == "root" and "two" in other.text
    async with serving(codec, [{"text": "one"}, {"text": "two"}], agentic_profiles=["none"]) as serve:
        for nonce in "ab":  # without the profile they are two
            answer = await serve.post("s", body(nonce), path="/v1/messages", **RETRY)
            assert answer.headers["x-silva-match"] == "root"


async def test_of_many_equal_requests_the_lost_ones_find_turns_of_their_own(codec: TurnCodec):
    clock = ManualClock()
    script: list[Json] = [{"text": f"t{number}", "delay_s": 3.0} for number in range(20)]
    async with serving(codec, script, clock=clock) as serve:
        clients = [RawClient(serve.server.port, "s") for _ in script]
        for client in clients:
            await client.send(BODY)
        await until(lambda: len(serve.calls("s")) == len(script))
        for client in clients[:5]:
            await lost(serve, client)
        again = [asyncio.create_task(serve.post("s", BODY, **RETRY)) for _ in range(5)]
        records = serve.session("s").requests
        await until(lambda: len(records) == 25)
        await clock.advance(3)
        texts = [content((await answer).json()) for answer in again]
        for client in clients[5:]:
            _, headers = await client.head()
            assert client._streams is not None
            texts.append(content(json.loads(await client._streams[0].readexactly(int(headers["content-length"])))))
            client.abort()
        assert sorted(texts) == sorted(str(line["text"]) for line in script)
        assert len(serve.responses("s")) == len(script)
        assert all(record.latency_s is not None for record in records)


async def test_a_session_holds_few_turns_and_nothing_of_it_stays(codec: TurnCodec):
    async with serving(codec, [{"text": "x"}]) as serve:
        for _ in range(MAX_ENDED + 9):
            await serve.chat("s", HI)
        live = serve.registry.find("s")
        assert live is not None
        turns = serve.app._endpoint._held[live]
        held = list(turns._ended_turns)
        assert len(held) == sum(map(len, turns._by_digest.values())) == MAX_ENDED
        known = [weakref.ref(thing) for thing in (live, live.session, live.session.forest, *held)]
        await serve.registry.finish("s", b"")
        serve.leases.release(live.session)
        serve.opened.clear()
        del live, held, turns
        gc.collect()
        assert [ref() for ref in known if ref() is not None] == []
