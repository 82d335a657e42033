"""Promises of the turn service that hold only under bad timing or after many sessions."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from gateway_serve import Json, Serve, serving

from silva.codec import TurnCodec
from silva.parsers import ParsedTurn, TurnParser
from silva.turns import session_registry
from silva.turns.session_client import SessionClient
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
