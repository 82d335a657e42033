"""Requests that repeat others: what joins, what is another sample, and what becomes of turns that nobody waits for."""

from __future__ import annotations

import asyncio
import json
import select
import socket

import pytest
from gateway_serve import Json, Serve, serving, until
from manual_clock import ManualClock
from raw_http import RawClient

from silva.codec import TurnCodec
from silva.gateway.held import MAX_ENDED
from silva.types.generation import GenerateRequest, GenerateResult

HI: list[Json] = [{"role": "user", "content": "hi"}]
OTHER: list[Json] = [{"role": "user", "content": "something else"}]
SLOW = [{"text": "one", "delay_s": 3.0}, {"text": "two", "delay_s": 3.0}]


def content(answer: Json) -> str:
    return answer["choices"][0]["message"]["content"]


def matches(serve: Serve, session: str = "s") -> list[str | None]:
    return [record.match for record in serve.session(session).requests]


def connections(serve: Serve) -> int:
    return len(serve.server._server.server_state.connections)


async def lost(serve: Serve, clock: ManualClock, **fields: object) -> None:
    """A request whose client goes away while the engine works on it."""
    client = RawClient(serve.server.port, "s")
    num = len(serve.calls("s"))
    await client.send({"model": "m", "messages": HI, **fields})
    await until(lambda: len(serve.calls("s")) > num)
    client.abort()
    await until(lambda: serve.session("s").requests[-1].error_code == "client_disconnected")


@pytest.mark.parametrize("header", [{"x_stainless_retry_count": "1"}, {"idempotency_key": "k"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_waits_for_the_turn_that_its_first_request_began(
    codec: TurnCodec, header: dict[str, str], stream: bool
):
    clock = ManualClock()
    async with serving(codec, SLOW, clock=clock) as serve:
        key = {"idempotency_key": "k"} if "idempotency_key" in header else {}
        first = asyncio.create_task(serve.post("s", {"model": "m", "messages": HI, "stream": stream}, **key))
        await until(lambda: serve.calls("s"))
        again = asyncio.create_task(serve.post("s", {"model": "m", "messages": HI}, **header))
        await until(lambda: len(serve.session("s").requests) == 2)
        await clock.until(lambda: first.done() and again.done())
        assert again.result().json()["choices"][0]["message"]["content"] == "one"
        assert again.result().headers["x-silva-match"] == "join"
        assert first.result().headers["x-silva-match"] == "root"
        assert again.result().headers["x-silva-state"] == first.result().headers["x-silva-state"]
        assert len(serve.calls("s")) == len(serve.responses("s")) == 1
        one, two = serve.session("s").requests
        assert (one.match, two.match, serve.turns.counters["match_join"]) == ("root", "join", 1)
        assert (one.node_id, one.usage, one.finish_reason) == (two.node_id, two.usage, two.finish_reason)
        assert (one.http_status, two.http_status) == (200, 200)


async def test_a_told_turn_is_told_again_to_who_shows_evidence(codec: TurnCodec):
    async with serving(codec, [{"text": "one"}, {"text": "two"}, {"text": "three"}]) as serve:
        first = (await serve.post("s", {"model": "m", "messages": HI, "logprobs": True})).json()
        for count in ("1", "2"):
            again = await serve.post(
                "s", {"model": "m", "messages": HI, "logprobs": True}, x_stainless_retry_count=count
            )
            assert again.json() == first
        for count in ("0", "-1", "x", ""):  # none of these is a retry
            await serve.post("t" + count, {"model": "m", "messages": HI})
            assert content(
                (await serve.post("t" + count, {"model": "m", "messages": HI}, x_stainless_retry_count=count)).json()
            ) == ("two")
        assert len(serve.calls("s")) == 1
        assert content(await serve.chat("s", HI, logprobs=True)) == "two"  # asked on purpose
        assert serve.turns.counters["repeated_without_evidence"] == 5


async def test_what_asks_for_something_else_joins_nothing(codec: TurnCodec):
    async with serving(codec, [{"text": str(n)} for n in range(9)]) as serve:
        retry = {"x_stainless_retry_count": "1"}
        bodies: list[Json] = [
            {"model": "m", "messages": HI},
            {"model": "m", "messages": HI, "max_tokens": 7},
            {"model": "m", "messages": HI, "seed": 1},
            {"model": "m", "messages": HI, "stop": ["x"]},
            {"model": "m", "messages": HI, "logprobs": True},
            {"model": "m", "messages": HI, "chat_template_kwargs": {"a": 1}},
            {"model": "m", "messages": OTHER},
        ]
        for number, body in enumerate(bodies):
            assert content((await serve.post("s", body, **retry)).json()) == str(number)
        other = await serve.post("s", {"input": "hi"}, path="/v1/responses", **retry)
        assert other.headers["x-silva-match"] == "branch"
        # How the body is spelled and what is ignored is no difference.
        same = await serve.post("s", {"temperature": 0.3, "stream": False, "model": "m", "messages": HI}, **retry)
        assert content(same.json()) == "0"
        assert (
            content((await serve.post("t", {"model": "m", "messages": HI}, **retry)).json()) == "0"
        )  # another session, a turn of its own
        assert len(serve.calls("t")) == 1


async def test_idempotency_keys_decide_where_both_have_one(codec: TurnCodec):
    async with serving(codec, [{"text": "one"}, {"text": "two"}]) as serve:
        texts = [
            content(
                (
                    await serve.post(
                        "s", {"model": "m", "messages": HI}, idempotency_key=key, x_stainless_retry_count=count
                    )
                ).json()
            )
            for key, count in (("a", "0"), ("b", "1"), ("a", "0"), ("b", "0"))
        ]
        assert texts == ["one", "two", "one", "two"]


async def test_equal_requests_on_open_connections_are_samples_of_their_own(codec: TurnCodec):
    clock = ManualClock()
    async with serving(codec, SLOW, clock=clock) as serve:
        both = [asyncio.create_task(serve.post("s", {"model": "m", "messages": HI})) for _ in range(2)]
        await until(lambda: len(serve.calls("s")) == 2)
        await clock.until(lambda: all(task.done() for task in both))
        assert sorted(content(task.result().json()) for task in both) == ["one", "two"]
        assert len(serve.responses("s")) == 2
        assert sorted(task.result().headers["x-silva-match"] for task in both) == ["branch", "root"]
        assert sorted(map(str, matches(serve))) == ["branch", "root"]
        assert [record.difference for record in serve.session("s").requests] == [None, None]


@pytest.mark.parametrize(("path", "pointer"), [("/chat/completions", "/messages/0"), ("/responses", "/input/0")])
async def test_turns_that_began_together_are_compared_when_they_are_written(codec: TurnCodec, path: str, pointer: str):
    clock = ManualClock()
    name = "messages" if "chat" in path else "input"
    async with serving(codec, SLOW, clock=clock) as serve:
        bodies = [{name: [{"role": "user", "content": text}]} for text in ("a", "b")]
        both = [asyncio.create_task(serve.post("s", body, path=path)) for body in bodies]
        await until(lambda: len(serve.calls("s")) == 2)
        await clock.until(lambda: all(task.done() for task in both))
        found = [record.difference for record in serve.session("s").requests if record.difference]
        assert [difference["pointer"] for difference in found] == [f"{pointer}/content"]
        assert matches(serve) == ["root", "root"]


@pytest.mark.parametrize("streams", [(False, False), (True, False), (False, True)])
async def test_a_lost_request_is_joined_without_any_header(codec: TurnCodec, streams: tuple[bool, bool]):
    clock = ManualClock()
    async with serving(codec, SLOW, clock=clock) as serve:
        await lost(serve, clock, stream=streams[0])
        again = asyncio.create_task(serve.post("s", {"model": "m", "messages": HI, "stream": streams[1]}))
        await until(lambda: matches(serve)[1:] == ["join"])
        await clock.until(again.done)
        assert "one" in again.result().text
        assert len(serve.calls("s")) == len(serve.responses("s")) == 1
        assert serve.session("s").requests[0].error_code == "client_disconnected"
        assert serve.sample("s").num_turns == 1


async def test_each_of_two_lost_siblings_finds_its_own_turn(codec: TurnCodec):
    clock = ManualClock()
    async with serving(codec, SLOW, clock=clock) as serve:
        clients = [RawClient(serve.server.port, "s") for _ in range(2)]
        for client in clients:
            await client.send({"model": "m", "messages": HI})
        await until(lambda: len(serve.calls("s")) == 2)
        for client in clients:
            client.abort()
        await until(lambda: all(r.error_code for r in serve.session("s").requests))
        again = [
            asyncio.create_task(serve.post("s", {"model": "m", "messages": HI}, x_stainless_retry_count="1"))
            for _ in range(2)
        ]
        await until(lambda: matches(serve)[2:] == ["join", "join"])
        await clock.until(lambda: all(task.done() for task in again))
        assert sorted(content(task.result().json()) for task in again) == ["one", "two"]


async def test_a_reply_that_nobody_read_is_told_again(codec: TurnCodec):
    """The whole reply was written, and the client broke the connection off with the reply unread."""
    async with serving(codec, [{"text": "one"}, {"text": "two"}]) as serve:
        body = json.dumps({"model": "m", "messages": HI}).encode()
        head = b"POST /agentic_api/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer s\r\n"
        with socket.create_connection(("127.0.0.1", serve.server.port)) as client:
            client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: select.select([client], [], [], 0)[0])
        await until(lambda: not connections(serve))
        assert content(await serve.chat("s", HI)) == "one"
        assert len(serve.calls("s")) == 1


async def test_a_reply_that_was_read_is_not_told_again(codec: TurnCodec):
    async with serving(codec, [{"text": "one"}, {"text": "two"}]) as serve:
        client = RawClient(serve.server.port, "s")
        assert content(json.loads((await client.post({"model": "m", "messages": HI}))[1])) == "one"
        client.abort()
        await until(lambda: not connections(serve))
        assert content(await serve.chat("s", HI)) == "two"


async def test_a_turn_without_a_client_ends_uncommitted_after_the_grace(codec: TurnCodec):
    clock = ManualClock()
    script = [{"error": "hang"}, {"text": "two"}]
    async with serving(codec, script, clock=clock, agentic_disconnect_grace_s=30) as serve:
        await lost(serve, clock)
        await clock.advance(29.9)
        assert serve.engine.usage().num_running == 1
        await clock.advance(0.1)
        assert serve.engine.usage().num_running == 0 and not serve.session("s").open_turns
        assert serve.forest("s").nodes == []
        assert content(await serve.chat("s", HI)) == "two"


async def test_a_turn_that_ends_within_the_grace_waits_for_its_client(codec: TurnCodec):
    clock = ManualClock()
    async with serving(codec, SLOW, clock=clock) as serve:
        await lost(serve, clock)
        await clock.advance(10)
        assert serve.engine.usage().num_running == 0 and serve.forest("s").nodes == []
        assert content(await serve.chat("s", HI)) == "one"
        assert len(serve.calls("s")) == 1


async def test_another_history_ends_an_abandoned_turn_at_once(codec: TurnCodec):
    clock = ManualClock()
    async with serving(codec, [{"error": "hang"}, {"text": "two"}], clock=clock) as serve:
        await lost(serve, clock)
        assert content(await serve.chat("s", OTHER)) == "two"
        assert serve.engine.usage().num_running == 0 and not serve.session("s").open_turns
        assert serve.turns.counters["abandoned_turn"] == 1
        assert serve.sample("s").num_turns == 1  # nothing is left of it


async def test_a_dropped_turn_is_not_joined_while_it_ends(codec: TurnCodec, monkeypatch: pytest.MonkeyPatch):
    clock, may_end = ManualClock(), asyncio.Event()
    async with serving(codec, [{"error": "hang"}, {"text": "two"}, {"text": "three"}], clock=clock) as serve:
        generate = serve.engine.generate

        async def slow_to_end(request: GenerateRequest) -> GenerateResult:
            try:
                return await generate(request)
            except asyncio.CancelledError:
                await may_end.wait()
                raise

        monkeypatch.setattr(serve.engine, "generate", slow_to_end)
        await lost(serve, clock)
        assert content(await serve.chat("s", OTHER)) == "two"
        again = asyncio.create_task(serve.chat("s", HI))
        await until(lambda: len(matches(serve)) == 3 and matches(serve)[2])
        may_end.set()
        assert content(await again) == "three"
        assert matches(serve) == ["root", "root", "root"]


async def test_another_history_leaves_turns_with_clients_alone(codec: TurnCodec):
    clock = ManualClock()
    async with serving(codec, [{"text": "one", "delay_s": 5.0}, {"text": "two"}], clock=clock) as serve:
        first = asyncio.create_task(serve.post("s", {"model": "m", "messages": HI}))
        await until(lambda: serve.calls("s"))
        assert content(await serve.chat("s", OTHER)) == "two"
        await clock.until(first.done)
        assert content(first.result().json()) == "one"


async def test_the_end_of_a_session_ends_kept_turns_and_who_joined_them(codec: TurnCodec):
    clock = ManualClock()
    async with serving(codec, [{"error": "hang"}], clock=clock) as serve:
        await lost(serve, clock)
        joined = asyncio.create_task(serve.post("s", {"model": "m", "messages": HI}))
        await until(lambda: matches(serve)[1:] == ["join"])
        session = serve.session("s")
        await serve.registry.finish("s", b"")
        assert (await joined).status_code == 404
        assert serve.engine.usage().num_running == 0 and not session.open_turns
        assert [record.error_code for record in session.requests] == ["client_disconnected", "session_ended"]


async def test_an_error_that_was_told_is_not_told_again(codec: TurnCodec):
    script: list[Json] = [{"error": "500"}] * 4 + [{"text": "fine"}]
    async with serving(codec, script) as serve:
        sdk = serve.sdk("s").with_options(max_retries=2)
        answer = await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert answer.choices[0].message.content == "fine"
        assert [(r.http_status, r.match) for r in serve.session("s").requests] == [(503, "root"), (200, "root")]


async def test_only_the_last_turns_of_a_session_are_remembered(codec: TurnCodec):
    async with serving(codec, [{"text": "x"}]) as serve:
        retry = {"x_stainless_retry_count": "1"}
        bodies = [{"messages": [{"role": "user", "content": f"q {n}"}]} for n in range(MAX_ENDED + 1)]
        for body in bodies:
            await serve.post("s", body)
        assert (await serve.post("s", bodies[1], **retry)).headers["x-silva-match"] == "join"
        assert (await serve.post("s", bodies[0], **retry)).headers["x-silva-match"] == "branch"


async def test_a_json_answer_breathes_white_space_after_200_seconds(codec: TurnCodec):
    clock = ManualClock()
    async with serving(codec, [{"text": "late", "delay_s": 250.0}], clock=clock) as serve:
        client = RawClient(serve.server.port, "s")
        await client.send({"model": "m", "messages": HI})
        head = asyncio.create_task(client.head())
        await until(lambda: serve.calls("s"))
        await clock.advance(199.9)
        assert not head.done()
        await clock.advance(0.1)
        status, headers = await head
        assert (status, headers["content-type"], headers["x-silva-match"]) == (200, "application/json", "root")
        await clock.advance(50)
        chunks = [await client.chunk() for _ in range(5)]
        assert chunks[:4] == [b" "] * 4
        assert content(json.loads(b"".join(chunks))) == "late"
        assert await client.chunk() == b""
        await client.send({"model": "m", "messages": OTHER})  # the connection stays good
        client.abort()


async def test_the_sdk_reads_a_late_answer_and_a_late_error(codec: TurnCodec):
    clock = ManualClock()
    fault = {"error": "500", "delay_s": 250.0}
    script: list[Json] = [{"text": "late", "delay_s": 250.0}, fault, {"text": "later"}]
    async with serving(codec, script, clock=clock, retry_delays_s=()) as serve:
        sdk = serve.sdk("s").with_options(max_retries=1, timeout=9999)

        async def ask(text: str) -> str | None:
            answer = await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
            return answer.choices[0].message.content

        first = asyncio.create_task(ask("hi"))
        await clock.until(first.done, step_s=20)
        assert first.result() == "late"
        # The error comes behind a head that said 200: the connection is cut, and the SDK's retry gets the error. That
        # was its last try.
        second = asyncio.create_task(ask("hello"))
        await clock.until(second.done, step_s=20)
        assert "503" in str(second.exception()) and "inference engine failed" in str(second.exception())
        assert len(serve.calls("s")) == 2
        assert await ask("hello") == "later"


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("fails", [False, True])
async def test_data_heartbeats_are_events_that_clients_count(codec: TurnCodec, path: str, fails: bool):
    clock = ManualClock()
    line: Json = {"error": "500", "delay_s": 100.0} if fails else {"text": "done", "delay_s": 100.0}
    beats = {"agentic_sse_data_heartbeat_s": 40.0}
    async with serving(codec, [line], clock=clock, **beats, retry_delays_s=()) as serve:
        body: Json = {"model": "m", "stream": True, "max_tokens": 9}
        body |= {"input": "hi"} if "responses" in path else {"model": "m", "messages": HI}
        answer = asyncio.create_task(serve.post("s", body, path=path))
        await until(lambda: serve.calls("s"))
        await clock.until(answer.done, step_s=10)
        text = answer.result().text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        if "messages" in path:
            assert [event["type"] for event in events].count("ping") == 1 + 6 + 2  # connected, heartbeats, data
            return
        early, rest = events[:2], events[2:]
        if "chat" in path:
            assert [event["choices"] for event in early] == [[], []]
            assert fails or early[0]["id"] == early[1]["id"] == rest[0]["id"]
            assert ("error" if fails else "usage") in rest[0]
        else:
            assert [event["type"] for event in early] == ["response.created", "response.in_progress"]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert "response.created" not in [event["type"] for event in rest]
            assert {event["response"]["id"] for event in events if "response" in event} == {rest[-1]["response"]["id"]}
            assert rest[-1]["type"] == ("response.failed" if fails else "response.completed")
