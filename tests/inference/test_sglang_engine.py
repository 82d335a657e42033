"""The SGLang engine through the real gateway, over HTTP to a server of that shape."""

from __future__ import annotations

import asyncio
import gc
import re
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_serve import Json, Serve, serving, until
from hypothesis import given
from hypothesis import strategies as st
from manual_clock import ManualClock
from raw_http import RawClient
from sglang_stub import Answer, SglangStub

from silva.codec import TurnCodec
from silva.inference.sglang import SglangEngine
from silva.inference.sglang_http import KEPT_BACK
from silva.inference.sglang_wire import attempt_rid
from silva.types.clock import SystemClock
from silva.types.errors import ConfigError, EngineFault
from silva.types.generation import EngineUsage, GenerateRequest, Media, SamplingParams, VersionSpan
from silva.types.weights import MemoryWeights

HI: list[Json] = [{"role": "user", "content": "hi"}]


def sampled(codec: TurnCodec, text: str) -> list[int]:
    return [*codec.encode_sampled(text), codec.end_of_turn_id()]


def engine_for(*stubs: SglangStub, **options: Any) -> SglangEngine:
    options = {"clock": SystemClock(), "timeout_s": 60.0, "fallback_context_len": 4096, "ready_wait_s": 0.2, **options}
    return SglangEngine([stub.url for stub in stubs], **options)


@asynccontextmanager
async def gateway(codec: TurnCodec, *stubs: SglangStub, **options: Any) -> AsyncIterator[Serve]:
    """A gateway before these servers. The calls of all are told in the form of the scripted engine's log."""

    def recorded() -> list[Json]:
        calls: list[Json] = []
        for call in (call for stub in stubs for call in stub.calls):
            _, request_id, attempt = call["rid"].split("-")
            owner = next(s for s in serve.opened.values() if any(r.request_id == request_id for r in s.requests))
            ids = {"session_id": owner.session_id, "request_id": request_id, "attempt": int(attempt, 16)}
            calls.append({**call, **ids})
        return calls

    async with AsyncExitStack() as stack:
        for stub in stubs:
            await stack.enter_async_context(stub)
        clock = options.pop("clock", SystemClock())
        engine = engine_for(*stubs, clock=clock, timeout_s=options.get("engine_timeout_s", 60.0))
        serve = await stack.enter_async_context(
            serving(codec, [], clock=clock, engine=engine, recorded=recorded, **options)
        )
        yield serve


@asynccontextmanager
async def started(*stubs: SglangStub, **options: Any) -> AsyncIterator[SglangEngine]:
    async with AsyncExitStack() as stack:
        for stub in stubs:
            await stack.enter_async_context(stub)
        engine = engine_for(*stubs, **options)
        await engine.start()
        stack.push_async_callback(engine.close)
        yield engine


def request(session: str = "s", **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=100, **fields.pop("sampling", {}))
    return GenerateRequest(request_id="r1", session_id=session, input_ids=[1, 2, 3], sampling=sampling, **fields)


async def test_ids_cross_the_wire_unchanged_in_both_directions(codec: TurnCodec):
    answers = [sampled(codec, "one"), sampled(codec, " two\n"), sampled(codec, "3")]
    stub = SglangStub(*(Answer(ids=ids, logprob=-0.1 * n) for n, ids in enumerate(answers, start=1)))
    async with gateway(codec, stub) as serve:
        history = list(HI)
        for turn in range(3):
            history += [await serve.message("s", history), {"role": "user", "content": f"next {turn}"}]
        sample = serve.sample("s")
        responses = [list(node.sampled) for node in serve.responses("s")]
        assert responses == answers
        on = [at for at, mask in enumerate(sample.loss_mask) if mask]
        assert [sample.token_ids[at] for at in on] == [token for ids in answers for token in ids]
        expected = [-0.1 * n for n, ids in enumerate(answers, start=1) for _ in ids]
        assert [sample.logprobs[at] for at in on] == pytest.approx(expected)
        assert stub.calls[2]["input_ids"] == sample.token_ids[: len(stub.calls[2]["input_ids"])]
        assert stub.num_connections == 1


async def test_the_request_says_everything_that_a_server_could_choose_itself(codec: TurnCodec):
    stub = SglangStub(Answer(ids=sampled(codec, "ok")))
    sampling = {"rollout_temperature": 0.7, "rollout_stop": ["HALT"], "rollout_max_response_len": 9}
    async with gateway(codec, stub, **sampling) as serve:
        await serve.chat("s", HI, seed=7, stop=["STOP"])
        (call,) = stub.calls
        params = call["sampling_params"]
        assert set(params.pop("stop_token_ids")) == set(codec.stop_ids)
        assert params == {
            "max_new_tokens": 9,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": -1,
            "stop": ["HALT", "STOP"],
            "ignore_eos": False,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
            "sampling_seed": 7,
        }
        assert (call["return_logprob"], call["logprob_start_len"], call["stream"]) == (True, -1, False)
        assert "image_data" not in call and "text" not in call


async def test_an_abort_keeps_its_ids_and_the_turn_goes_on(codec: TurnCodec):
    ids = sampled(codec, "one two three")
    stub = SglangStub(
        Answer(ids=ids, hold_at=2, versions=[("3", len(ids))]),
        Answer(ids=ids[2:], versions=[("4", len(ids) - 2)]),
    )
    async with gateway(codec, stub) as serve:
        turn = asyncio.create_task(serve.chat("s", HI))
        await until(lambda: stub.num_held)
        session = serve.session("s")
        session.close_gate()
        assert await serve.turns.abort_running(["s"]) == 1
        await until(lambda: session.attempts)
        session.open_gate()
        await turn
        (node,) = serve.responses("s")
        assert list(node.sampled) == ids
        assert stub.calls[1]["input_ids"] == stub.calls[0]["input_ids"] + ids[:2]
        assert stub.aborts == [stub.calls[0]["rid"]] and stub.calls[0]["rid"] != stub.calls[1]["rid"]
        assert [(span.start, span.length, span.version) for span in node.spans] == [(0, 2, 3), (2, len(ids) - 2, 4)]
        assert [(record.num_output, record.finish_reason) for record in session.attempts] == [
            (2, "abort"),
            (len(ids) - 2, "stop"),
        ]
        serve.sample("s")


async def test_an_abort_that_overtakes_its_request_is_told_again():
    clock = ManualClock()
    async with started(SglangStub(Answer(ids=[5, 6], hold_at=1)), clock=clock) as engine:
        task = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(0)
        assert engine.usage().num_running == 1
        await engine.abort("r1")
        await engine.abort("unknown")
        await clock.until(task.done)
        assert (await task).ids == [5]
        assert engine.usage() == EngineUsage()


async def test_versions_of_one_answer_become_spans():
    answer = Answer(ids=[5, 6, 7], versions=[("default", 0), ("2", 2), ("3", 3)])
    async with started(SglangStub(answer)) as engine:
        result = await engine.generate(request())
        assert result.version_spans == (
            VersionSpan(start=0, length=2, version=2),
            VersionSpan(start=2, length=1, version=3),
        )
        assert engine.version == 3


@pytest.mark.parametrize(
    ("sampling", "ids", "num", "finish", "matched"),
    [
        ({"stop_token_ids": (7,)}, [5, 6, 7, 8], 3, "stop", 7),
        ({"stop": ("67",)}, [5, 6, 7, 8], 3, "stop", "67"),
        ({}, [5] * 200, 100, "length", None),
    ],
)
async def test_what_ended_an_answer_is_told(sampling: Json, ids: list[int], num: int, finish: str, matched: object):
    stub = SglangStub(Answer(ids=ids), decode=lambda ids: "".join(map(str, ids)))
    async with started(stub) as engine:
        result = await engine.generate(request(sampling=sampling))
        assert (result.ids, result.finish_reason, result.matched_stop) == (ids[:num], finish, matched)
        assert result.kept_mass == [1.0] * num


BROKEN = {
    "500": (Answer(fault="500"), "status 500"),
    "reset": (Answer(fault="reset"), "disconnected|reset"),
    "bad_json": (Answer(fault="bad_json"), "cannot be read"),
    "no meta": (Answer(ids=[5], body={"output_ids": None}), "output_ids"),
    "ids as text": (Answer(ids=[5], body={"output_ids": "5"}), "array"),
    "an id as text": (Answer(ids=[5], body={"output_ids": ["5"]}), "int"),
    "no finish": (Answer(ids=[5], meta={"finish_reason": None}), "finish_reason"),
    "odd finish": (Answer(ids=[5], finish="tired"), "tired"),
    "no log-probs": (Answer(ids=[5], meta={"output_token_logprobs": None}), "0 output_token_logprobs"),
    "fewer log-probs": (Answer(ids=[5, 6], meta={"output_token_logprobs": [[-1.0, 5, None]]}), "2 output_ids and 1"),
    "other ids": (Answer(ids=[5], meta={"output_token_logprobs": [[-1.0, 6, None]]}), r"output_token_logprobs\[0\]"),
    "null log-prob": (Answer(ids=[5], meta={"output_token_logprobs": [[None, 5, None]]}), "float"),
    "endless log-prob": (Answer(ids=[5], meta={"output_token_logprobs": [[float("-inf"), 5, None]]}), "read"),
    "positive log-prob": (Answer(ids=[5], logprob=1.0), "at most 0"),
    "huge id": (Answer(ids=[1 << 40]), "no vocabulary"),
    "empty": (Answer(ids=[]), "without any id"),
    "other request": (Answer(ids=[5], meta={"id": "other"}), "other"),
    "cut prompt": (Answer(ids=[5], meta={"prompt_tokens": 1}), "truncate"),
    "odd version": (Answer(ids=[5], meta={"weight_version": "final"}), "final"),
    "gap in versions": (Answer(ids=[5, 6], meta={"weight_versions": [{"version": "1", "start": 1, "end": 2}]}), "gap"),
    "short versions": (Answer(ids=[5, 6], versions=[("1", 1)]), "cover 1 of 2"),
    "more than asked": (Answer(ids=[5] * 3, finish="abort"), "at most 2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_answer_is_tried_again_then_told(codec: TurnCodec, name: str):
    answer, reason = BROKEN[name]
    good = Answer(ids=sampled(codec, "ok")[:1])
    stub = SglangStub(answer, good, answer)
    async with gateway(codec, stub, rollout_max_response_len=2) as serve:
        assert (await serve.post("s", {"messages": HI})).status_code == 200
        attempts = [(record.finish_reason, record.num_output) for record in serve.session("s").attempts]
        assert attempts == [("error", 0), ("stop", 1)]
        failed = await serve.post("s", {"messages": [*HI, {"role": "user", "content": "again"}]})
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_error")
        assert len(stub.calls) == 2 + 4
        error = serve.session("s").attempts[-1].error or ""
        assert re.search(reason, error), error


async def test_a_silent_server_is_given_up_and_another_takes_over(codec: TurnCodec):
    clock = ManualClock()
    stubs = [SglangStub(Answer(fault="hang")), SglangStub(Answer(ids=sampled(codec, "ok")))]
    async with gateway(codec, *stubs, clock=clock, engine_timeout_s=300.0, retry_delays_s=(1.0,) * 3) as serve:
        name = next(f"s{n}" for n in range(99) if serve.engine._url_of(f"s{n}") == stubs[0].url)
        turn = asyncio.create_task(serve.post(name, {"messages": HI}))
        await until(lambda: stubs[0].num_held)
        await clock.advance(299)
        assert not turn.done() and not stubs[1].calls
        await clock.until(lambda: stubs[1].calls)
        assert (await turn).status_code == 200
        await until(lambda: stubs[0].lost and stubs[0].aborts)
        assert stubs[0].aborts == stubs[0].lost == [stubs[0].calls[0]["rid"]]
        await serve.chat(name, HI)
        assert len(stubs[1].calls) == 2, "the session stays where it was served"
        assert serve.engine.usage().counters == {"engine_moved": 1}


async def test_sessions_spread_over_servers_and_each_stays_with_one(codec: TurnCodec):
    stubs = [SglangStub(Answer(ids=sampled(codec, "ok"))) for _ in range(2)]
    async with gateway(codec, *stubs) as serve:
        for _ in range(2):
            for number in range(12):
                await serve.chat(f"s{number}", HI)
        sessions = [{call["rid"].split("-")[1][:16] for call in stub.calls} for stub in stubs]
        assert sessions[0] and sessions[1] and not sessions[0] & sessions[1]


async def test_a_lost_client_frees_the_server(codec: TurnCodec):
    stub = SglangStub(Answer(fault="hang"))
    async with gateway(codec, stub, agentic_disconnect_grace_s=0) as serve:
        client = RawClient(serve.server.port, "s")
        await client.send({"messages": HI})
        await until(lambda: stub.num_held)
        client.abort()
        await until(lambda: stub.lost and stub.aborts)
        assert stub.lost == stub.aborts == [stub.calls[0]["rid"]]
        assert serve.engine.usage().num_running == 0 and serve.forest("s").nodes == []


async def test_the_last_aborts_are_sent_before_the_engine_closes():
    stub = SglangStub(Answer(fault="hang"))
    async with started(stub) as engine:
        running = asyncio.create_task(engine.generate(request()))
        await until(lambda: stub.num_held)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await engine.close()
        assert stub.aborts == [stub.calls[0]["rid"]]


async def test_a_session_that_ended_leaves_no_choice_of_server_behind():
    stubs = [SglangStub(Answer(ids=[5])) for _ in range(2)]
    async with started(*stubs) as engine:
        await engine.generate(request())
        first, second = sorted(stubs, key=lambda stub: -len(stub.calls))
        first.status = 400
        with pytest.raises(EngineFault):
            await engine.generate(request())
        await engine.generate(request())
        assert len(second.calls) == 1, "the fault moved the session"
        first.status = None
        await engine.close_session("s")
        await engine.generate(request())
        assert len(second.calls) == 1


async def test_images_go_as_data_uris_or_web_addresses(tmp_path: Path):
    stub = SglangStub(Answer(ids=[5], meta={"prompt_tokens": 70}))
    async with started(stub) as engine:
        images = (b"\x89PNG\r\n", b"\xff\xd8\xff\xe0", b"RIFF\0\0\0\0WEBP")
        media = [Media(kind="image", digest=str(n), path=tmp_path / str(n)) for n in range(len(images))]
        for item, data in zip(media, images, strict=True):
            assert item.path is not None
            item.path.write_bytes(data)
        web = Media(kind="image", digest="w", url="https://example.org/a.png")
        await engine.generate(request(media=(*media, web)))
        kinds = [uri.partition(";base64,")[0] for uri in stub.calls[0]["image_data"]]
        assert kinds == ["data:image/png", "data:image/jpeg", "data:image/webp", web.url]
        with pytest.raises(EngineFault, match="cannot be read again"):
            await engine.generate(request(media=(Media(kind="image", digest="x", path=tmp_path / "gone"),)))


async def test_what_a_server_cannot_do_truthfully_is_refused():
    async with started(SglangStub(Answer(ids=[5]))) as engine:
        for sampling in ({"top_p": 0.9}, {"top_k": 1}):
            with pytest.raises(EngineFault, match="top-p or top-k"):
                await engine.generate(request(sampling=sampling))
        greedy = await engine.generate(request(sampling={"temperature": 0.0, "top_p": 0.9}))
        assert greedy.ids == [5]
        with pytest.raises(ConfigError, match="not built"):
            await engine.load_weights(MemoryWeights(named={}, version=1))


@pytest.mark.parametrize(
    ("server", "limit"),
    [
        ({"max_req_input_len": 1000, "context_length": 5000}, 1000),
        ({"context_length": 2000, "max_total_num_tokens": 9000}, 2000 - KEPT_BACK),
        ({"context_length": None, "max_total_num_tokens": 3000}, 3000 - KEPT_BACK),
        ({"context_length": "x"}, 4096 - KEPT_BACK),
        (None, 4096 - KEPT_BACK),
    ],
)
@pytest.mark.parametrize("old_routes", [False, True])
async def test_the_context_is_what_the_server_has_room_for(server: Json | None, limit: int, old_routes: bool):
    stub = SglangStub(Answer(ids=[5]))
    stub.server, stub.old_routes = server, old_routes
    stub.model = {"model_path": "m", "weight_version": "12"}
    async with started(stub) as engine:
        assert (engine.max_context_len, engine.version) == (limit, 12)


async def refused(*stubs: SglangStub) -> str:
    with pytest.raises(ConfigError) as caught:
        async with started(*stubs):
            pass
    return str(caught.value)


@pytest.mark.slow
async def test_servers_that_cannot_be_used_are_named_at_start():
    def stub(model: Json | None, **fields: Any) -> SglangStub:
        made = SglangStub(Answer(ids=[5]))
        made.model = None if model is None else {"model_path": "m", "weight_version": "1", **model}
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    assert "no SGLang server" in await refused(stub(None))
    assert "status 401" in await refused(stub({}, status=401))
    assert "within 0.2 s" in await refused(stub({}, status=503))
    engine = SglangEngine(["http://127.0.0.1:9"], clock=SystemClock(), timeout_s=0.1, fallback_context_len=99)
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:9: no server answered within 0.1 s .*Is it running"):
        await engine.start()
    assert "generates no text" in await refused(stub({"is_generation": False}))
    assert "min_p" in await refused(stub({"preferred_sampling_params": {"min_p": 0.1, "top_p": 0.9}}))
    assert "'best'" in await refused(stub({"weight_version": "best"}))
    assert "same weight version" in await refused(stub({}), stub({"weight_version": "2"}))
    assert "same model" in await refused(stub({}), stub({"model_path": "n"}))
    assert "room for" in await refused(stub({}, server={"max_req_input_len": 1}))


async def test_a_server_that_is_still_loading_is_waited_for():
    clock = ManualClock()
    stub = SglangStub(Answer(ids=[5]))
    async with stub:
        stub.status = 503
        engine = engine_for(stub, clock=clock, timeout_s=1e6, ready_wait_s=1e6)
        starting = asyncio.create_task(engine.start())
        await clock.advance(30)
        assert not starting.done()
        stub.status = None
        await clock.until(starting.done)
        await starting
        await engine.close()


@pytest.mark.slow
async def test_a_turn_that_waits_for_its_server_holds_no_copy_of_its_context(codec: TurnCodec):
    stub = SglangStub(Answer(ids=sampled(codec, "one")), Answer(ids=sampled(codec, "two"), hold_at=0))
    async with gateway(codec, stub) as serve:
        history: list[Json] = [{"role": "user", "content": "a b c d " * 2000}]
        history += [await serve.message("s", history), {"role": "user", "content": "go on"}]
        gc.collect()
        tracemalloc.start()
        try:
            waiting = asyncio.create_task(serve.message("s", history))
            await until(lambda: len(stub.calls) == 2)
            assert len(stub.calls[1]["input_ids"]) > 8000
            gc.collect()
            ours = [tracemalloc.Filter(True, f"*/{name}/*") for name in ("silva", "aiohttp")]
            found = tracemalloc.take_snapshot().filter_traces(ours).statistics("filename")
        finally:
            tracemalloc.stop()
        assert sum(entry.size for entry in found) < 30_000, found  # four bytes an id would be more
        stub.release()
        await waiting


fixed = st.text("0123456789abcdef", min_size=24, max_size=24)


@given(st.tuples(fixed, fixed), st.tuples(st.integers(0, 1 << 31), st.integers(0, 1 << 31)), st.sampled_from("ab"))
def test_no_rid_is_a_prefix_of_another(ids: tuple[str, str], attempts: tuple[int, int], nonce: str):
    first, second = (
        attempt_rid(
            name * 8,
            GenerateRequest(
                request_id=request_id,
                session_id="s",
                input_ids=[1],
                sampling=SamplingParams(max_new_tokens=1),
                attempt=attempt,
            ),
        )
        for name, request_id, attempt in zip(("a", nonce), ids, attempts, strict=True)
    )
    same = nonce == "a" and ids[0] == ids[1] and attempts[0] == attempts[1]
    assert first.startswith(second) == second.startswith(first) == same
