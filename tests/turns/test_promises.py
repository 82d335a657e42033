"""Promises of the turn service that hold only under bad timing or after many sessions."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from gateway_serve import Json, Serve, serving, until
from manual_clock import ManualClock

from silva.codec import TurnCodec
from silva.parsers import ParsedTurn, TurnParser
from silva.turns import session_registry
from silva.turns.session_client import SessionClient
from silva.types.generation import GenerateRequest, GenerateResult
from silva.wire.formats import FORMATS

HI: Json = {"messages": [{"role": "user", "content": "hi"}]}


def client_of(serve: Serve, session_id: str) -> SessionClient:
    live = serve.registry.find(session_id)
    assert live is not None
    return SessionClient(turns=serve.turns, live=live, form=FORMATS["chat/completions"])


class SlowParser(TurnParser):
    """Reads a turn long enough for another one of the same state to end."""

    def parse(self, text: str, **more: Any) -> ParsedTurn:
        time.sleep(0.1)
        return super().parse(text, **more)


async def test_two_answers_of_one_state_get_calls_of_different_ids(codec: TurnCodec):
    text = "word " * 1500 + '\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    parser = SlowParser.from_names(reasoning="none", tool_call="generic")
    assert isinstance(parser, SlowParser)
    async with serving(codec, [{"text": text}], parser=parser) as serve:
        client = client_of(serve, "s")
        answers = await asyncio.gather(*(client.ask(HI) for _ in range(3)))
        calls = [answer["choices"][0]["message"]["tool_calls"][0]["id"] for _, answer in answers]
        assert len(set(calls)) == 3
        assert sorted(node.messages[0].tool_calls[0].id for node in serve.responses("s")) == sorted(calls)


async def test_an_attempt_that_succeeds_gives_back_all_retries(codec: TurnCodec):
    script: list[Json] = [{"error": "500"}, {"text": "one two", "abort_after": 1}, {"error": "500"}, {"text": " end"}]
    async with serving(codec, script, retry_delays_s=(0.001,)) as serve:
        status, _ = await client_of(serve, "s").ask(HI)
        assert status == 200
        ends = [attempt.finish_reason for attempt in serve.session("s").attempts]
        assert ends == ["error", "abort", "error", "stop"]


async def test_of_many_ended_sessions_the_oldest_is_forgotten(codec: TurnCodec, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session_registry, "MAX_REMEMBERED", 2)
    async with serving(codec, [{"text": "ok"}], open_sessions=False) as serve:
        registry = serve.registry
        for name in "abc":
            registry.open(name, "g", "train")
        for name in "bca":
            await registry.end(name)
        assert [registry.has_ended(name) for name in "bca"] == [False, True, True]


async def test_the_end_of_a_session_waits_for_its_turns_then_frees_the_engine(
    codec: TurnCodec, monkeypatch: pytest.MonkeyPatch
):
    async with serving(codec, [{"text": "late", "delay_s": 30}], open_sessions=False) as serve:
        session = serve.registry.open("s", "g", "train")
        session.open_gate()
        call = asyncio.create_task(client_of(serve, "s").ask(HI))
        await until(lambda: serve.calls("s"))
        freed: list[tuple[str, int, int]] = []

        async def close_session(session_id: str) -> None:
            freed.append((session_id, len(session.open_turns), len(session.attempts)))

        monkeypatch.setattr(serve.engine, "close_session", close_session)
        await serve.registry.end("s")
        assert freed == [("s", 0, 1)], "no turn runs when the engine frees the session, and its attempt is recorded"
        assert (await call)[0] == 404


async def test_a_turn_that_ended_is_not_aborted(codec: TurnCodec):
    async with serving(codec, [{"text": "ok"}]) as serve:
        await client_of(serve, "s").ask(HI)
        assert await serve.turns.abort_running() == 0


async def test_cached_tokens_are_those_of_the_first_attempt(codec: TurnCodec, monkeypatch: pytest.MonkeyPatch):
    async with serving(codec, [{"text": "one two", "abort_after": 1}, {"text": " end"}]) as serve:
        generate, cached = serve.engine.generate, iter((3, 9))

        async def counting(request: GenerateRequest) -> GenerateResult:
            return replace(await generate(request), cached_tokens=next(cached))

        monkeypatch.setattr(serve.engine, "generate", counting)
        _, reply = await client_of(serve, "s").ask(HI)
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


async def test_an_engine_that_aborts_at_once_is_not_asked_without_a_pause(codec: TurnCodec):
    clock = ManualClock()
    script: list[Json] = [{"text": "one", "abort_after": 0}, {"text": "two"}]
    async with serving(codec, script, clock=clock) as serve:
        call = asyncio.create_task(client_of(serve, "s").ask(HI))
        await until(lambda: serve.session("s").attempts)
        await asyncio.sleep(0.02)
        assert len(serve.calls("s")) == 1
        await clock.advance(1.0)
        assert (await asyncio.wait_for(call, 10))[0] == 200
