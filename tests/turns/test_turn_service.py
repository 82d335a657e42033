"""Attempts, gates, versions, seeds, siblings: what happens between a request and its commit."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence

import pytest
from gateway_serve import Json, serving, until
from manual_clock import ManualClock
from raw_http import RawClient

from silva.codec import TurnCodec, TurnDelta
from silva.types.messages import Conversation, Message
from silva.types.rollout import AttemptRow
from silva.types.weights import MemoryWeights

HI: list[Json] = [{"role": "user", "content": "hi"}]


async def test_an_abort_is_continued_inside_the_same_request(codec: TurnCodec):
    script = [
        {"text": "one two three", "abort_after": 2, "weight_version": 1},
        {"text": "four", "abort_after": 0, "weight_version": 2},
        {"text": " end", "weight_version": 3},
    ]
    async with serving(codec, script, rollout_max_response_len=20) as serve:
        answer = await serve.chat("s", HI, seed=7)
        calls = serve.calls("s")
        (node,) = serve.responses("s")
        head = codec.encode_sampled("one two three")[:2]
        tail = [*codec.encode_sampled(" end"), codec.end_of_turn_id()]
        assert list(node.sampled) == head + tail
        assert calls[1]["input_ids"] == calls[2]["input_ids"] == calls[0]["input_ids"] + head
        assert [call["sampling_params"]["max_new_tokens"] for call in calls] == [20, 18, 18]
        assert [call["attempt"] for call in calls] == [0, 1, 2]
        assert len({call["request_id"] for call in calls}) == 1
        seeds = [call["sampling_params"]["seed"] for call in calls]
        assert seeds == [7, 7, 7]  # random numbers belong to absolute positions
        assert [(span.start, span.length, span.version) for span in node.spans] == [(0, 2, 1), (2, len(tail), 3)]
        assert node.num_aborts == 2
        assert answer["usage"]["completion_tokens"] == 2 + len(tail)
        assert answer["usage"]["prompt_tokens"] == len(calls[0]["input_ids"])
        records: list[AttemptRow] = serve.session("s").attempts
        assert [(record.num_output, record.finish_reason, record.weight_version) for record in records] == [
            (2, "abort", 1),
            (0, "abort", None),
            (len(tail), "stop", 3),
        ]
        serve.sample("s")


async def test_an_abort_at_the_end_of_the_budget_is_a_cut_turn(codec: TurnCodec):
    async with serving(codec, [{"text": "one two three", "abort_after": 3}]) as serve:
        answer = await serve.chat("s", HI, max_tokens=3)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert len(serve.calls("s")) == 1
        assert serve.responses("s")[0].finish == "length"


async def test_a_stop_string_that_an_abort_split_is_found(codec: TurnCodec):
    script = [{"text": "yes EN", "abort_after": len(codec.encode_sampled("yes EN"))}, {"text": "D and more"}]
    async with serving(codec, script) as serve:
        answer = await serve.chat("s", HI, stop=["END"])
        assert answer["choices"][0]["message"]["content"] == "yes "
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert codec.decode(list(serve.responses("s")[0].sampled)) == "yes END"
        serve.sample("s")


async def test_stop_strings_of_run_and_request_are_merged(codec: TurnCodec):
    async with serving(codec, [{"text": "alpha STOP beta"}], rollout_stop=["HALT"]) as serve:
        answer = await serve.chat("s", HI, stop="STOP")
        assert answer["choices"][0]["message"]["content"] == "alpha "
        assert serve.calls("s")[0]["sampling_params"]["stop"] == ["HALT", "STOP"]
        assert codec.decode(list(serve.responses("s")[0].sampled)) == "alpha STOP"


async def test_the_run_not_the_request_says_how_hot_it_samples(codec: TurnCodec):
    sampling = {"rollout_temperature": 0.7, "rollout_top_p": 0.9, "rollout_top_k": 20}
    async with serving(codec, [{"text": "ok"}], **sampling) as serve:
        await serve.chat("s", HI, temperature=2, top_p=0.1)
        params = serve.calls("s")[0]["sampling_params"]
        assert (params["temperature"], params["top_p"], params["top_k"]) == (0.7, 0.9, 20)
        assert set(params["stop_token_ids"]) == set(codec.stop_ids)


async def test_seeds_repeat_with_the_run_and_differ_between_requests(codec: TurnCodec):
    seen: list[list[int]] = []
    for seed in (1, 1, 2):
        async with serving(codec, [{"text": "ok"}], seed=seed) as serve:
            for session in ("a", "a", "b"):
                await serve.chat(session, HI)
            seen.append([call["sampling_params"]["seed"] for call in serve.calls()])
    assert seen[0] == seen[1] != seen[2]
    assert len(set(seen[0])) == 3


async def test_a_closed_gate_holds_the_request_and_nothing_is_sampled(codec: TurnCodec):
    async with serving(codec, [{"text": "ok"}], open_sessions=False) as serve:
        session = serve.registry.open("s", "g", "train")
        request = asyncio.create_task(serve.post("s", {"messages": HI}))
        await asyncio.wait_for(session.first_request.wait(), 10)
        await asyncio.sleep(0.05)
        assert not request.done() and serve.calls() == []
        session.open_gate()
        assert (await request).status_code == 200
        assert session.requests[0].wait_s > 0


async def test_pausing_aborts_the_attempt_and_the_turn_goes_on_under_new_weights(codec: TurnCodec):
    clock = ManualClock()
    script = [{"text": "one two three four", "per_token_s": 1.0}, {"text": " end"}]
    async with serving(codec, script, clock=clock) as serve:
        request = asyncio.create_task(serve.post("s", {"messages": HI}))
        await until(lambda: serve.calls("s"))
        await clock.advance(2.5)
        session = serve.session("s")
        session.close_gate()
        assert await serve.turns.abort_running(["other"]) == 0
        assert await serve.turns.abort_running(["s"]) == 1
        await until(lambda: session.attempts)
        assert session.attempts[0].num_output == 2
        await serve.engine.load_weights(MemoryWeights(named={}, version=5))
        await clock.advance(100)
        assert len(serve.calls("s")) == 1, "a closed gate holds the next attempt"
        session.open_gate()
        assert (await request).status_code == 200
        (node,) = serve.responses("s")
        assert [span.version for span in node.spans] == [0, 5]
        assert session.active.elapsed_s() == pytest.approx(2.5)
        serve.sample("s")


async def test_faults_are_tried_again_after_pauses_then_told(codec: TurnCodec):
    clock = ManualClock()
    async with serving(codec, [{"error": "500"}], clock=clock, retry_delays_s=(1.0, 2.0, 4.0)) as serve:
        request = asyncio.create_task(serve.post("s", {"messages": HI}))
        for calls, pause_s in ((1, 1.0), (2, 2.0), (3, 4.0)):
            await until(lambda calls=calls: len(serve.calls("s")) == calls)
            await clock.advance(pause_s - 0.2)
            assert len(serve.calls("s")) == calls
            await clock.advance(0.25)
        answer = await request
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_error")
        assert "status 500" in answer.json()["error"]["message"]
        assert serve.forest("s").nodes == []
        assert serve.session("s").requests[0].http_status == 503


async def test_a_silent_engine_is_given_up_after_its_time(codec: TurnCodec):
    clock = ManualClock()
    script = [{"error": "hang"}, {"text": "ok"}]
    async with serving(codec, script, clock=clock, engine_timeout_s=300.0, retry_delays_s=(1.0,)) as serve:
        request = asyncio.create_task(serve.post("s", {"messages": HI}))
        await until(lambda: serve.calls("s"))
        await clock.advance(299)
        assert serve.engine.usage().num_running == 1 and len(serve.calls("s")) == 1
        await clock.advance(3)
        assert (await request).status_code == 200
        assert "300 s" in (serve.session("s").attempts[0].error or "")


async def test_identical_requests_on_open_connections_are_siblings(codec: TurnCodec):
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    async with serving(codec, [{"text": call, "delay_s": 0.02}]) as serve:
        answers = await asyncio.gather(*(serve.message("s", HI) for _ in range(4)))
        nodes = serve.responses("s")
        assert len(nodes) == 4
        assert len({node.parent.node_id for node in nodes if node.parent}) == 1
        assert len({answer["tool_calls"][0]["id"] for answer in answers}) == 4
        for node in nodes:
            serve.sample("s", node)


async def test_headers_tell_where_the_request_met_the_forest(codec: TurnCodec):
    async with serving(codec, [{"text": "ok"}]) as serve:
        first = await serve.post("s", {"messages": HI})
        message = first.json()["choices"][0]["message"]
        more = [*HI, message, {"role": "user", "content": "more"}]
        second = await serve.post("s", {"messages": more})
        third = await serve.post("s", {"messages": [*HI, message, {"role": "user", "content": "other"}]})
        again = await serve.post("s", {"messages": more})
        matches = [answer.headers["x-silva-match"] for answer in (first, second, third, again)]
        assert matches == ["root", "append", "branch", "branch"]
        state = serve.responses("s")[0].key.hex()
        assert second.headers["x-silva-state"] == third.headers["x-silva-state"] == state
        assert all(answer.headers["x-silva-repairs"] == "0" for answer in (first, second, third, again))
        other_tools = await serve.post(
            "s", {"messages": more, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}
        )
        assert other_tools.headers["x-silva-match"] == "root"


async def test_rerender_makes_each_turn_a_new_root(codec: TurnCodec):
    async with serving(codec, [{"text": "ok"}], agentic_codec="rerender") as serve:
        message = await serve.message("s", HI)
        history = [*HI, message, {"role": "user", "content": "more"}]
        answer = await serve.post("s", {"messages": history})
        assert answer.headers["x-silva-match"] == "root"
        for node in serve.responses("s"):
            sample = serve.sample("s", node)
            assert sample.num_turns == 1
        expected = codec.tokenizer.apply_chat_template(
            [{"role": m["role"], "content": m["content"]} for m in history],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        assert serve.calls("s")[1]["input_ids"] == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("held", [False, True])
async def test_a_lost_client_ends_its_attempt_uncommitted(codec: TurnCodec, stream: bool, held: bool):
    async with serving(
        codec, [{"error": "hang"}, {"text": "ok"}], open_sessions=False, agentic_disconnect_grace_s=0
    ) as serve:
        session = serve.registry.open("s", "g", "train")
        if not held:
            session.open_gate()
        client = RawClient(serve.server.port, "s")
        await client.send({"messages": HI, "stream": stream})
        await until(lambda: session.open_turns if held else serve.calls("s"))
        client.abort()
        await until(lambda: not session.open_turns)
        assert serve.engine.usage().num_running == 0
        assert session.forest.nodes == []
        assert session.requests[0].error_code == "client_disconnected"
        if not held:
            assert (await serve.post("s", {"messages": HI})).status_code == 200
            assert len(session.forest.nodes) == 3


@pytest.mark.slow
async def test_two_hundred_clients_at_once(codec: TurnCodec):
    async with serving(codec, [{"text": "hello", "delay_s": 0.05}, {"text": "done"}]) as serve:

        async def client(number: int) -> None:
            http = RawClient(serve.server.port, f"s{number}")
            history = list(HI)
            for turn in range(2):
                status, body = await http.post({"messages": history})
                assert status == 200
                message = json.loads(body)["choices"][0]["message"]
                history += [message, {"role": "user", "content": f"next {turn}"}]
            http.abort()

        await asyncio.gather(*(client(number) for number in range(200)))
        assert serve.turns.counters["match_root"] == serve.turns.counters["match_append"] == 200
        for number in (0, 99, 199):
            assert serve.sample(f"s{number}").num_turns == 2


async def test_a_text_that_could_never_fit_is_refused_before_it_is_encoded(codec: TurnCodec):
    async with serving(codec, [{"text": "ok"}]) as serve:
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * 10_000_000}]}
        answer = await serve.post("s", body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
        assert "10000000 characters" in error["message"]
        assert serve.calls() == []
        await serve.chat("s", HI)  # the session goes on


async def test_a_step_that_takes_long_to_form_holds_no_other_session(codec: TurnCodec, monkeypatch: pytest.MonkeyPatch):
    begun, answered = threading.Event(), threading.Event()
    encode_root = codec.encode_root

    def slow(messages: Sequence[Message], conversation: Conversation) -> TurnDelta:
        if messages[0].content == "slow":
            begun.set()
            assert answered.wait(timeout=30)
        return encode_root(messages, conversation)

    monkeypatch.setattr(codec, "encode_root", slow)
    async with serving(codec, [{"text": "yes"}]) as serve:
        waiting = asyncio.create_task(serve.message("a", [{"role": "user", "content": "slow"}]))
        await until(begun.is_set)
        assert (await serve.message("b", HI))["content"] == "yes"
        answered.set()
        assert (await waiting)["content"] == "yes"
