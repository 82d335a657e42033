"""A teacher behind HTTP: a real server of SGLang's shape over loopback that scores what it is told to."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from manual_clock import ManualClock
from sglang_stub import Answer, SglangStub
from train_tiny import make_sample

from silva.inference.sglang_scorer import SglangScorer
from silva.types.clock import SystemClock
from silva.types.errors import ConfigError, RunStopped
from silva.types.rollout import TrainingSample

PROBE = {5: "tea", 40: "pot"}
WORDS = {**PROBE, 1: "x"}
SAMPLES = [
    make_sample("a", [3, 4, 5, 6, 7], [0, 0, 1, 0, 1]),
    make_sample("b", [3, 9], [0, 1]),
]


def decode(ids: list[int]) -> str:
    return "".join(WORDS.get(token, "?") for token in ids)


def score_of(ids: list[int], at: int) -> float:
    """Depends on the id, its place and all before it."""
    return -(ids[at] + 0.5 * at + 0.25 * sum(ids[:at])) / 16


@asynccontextmanager
async def teacher(stub: SglangStub, **options: Any) -> AsyncIterator[SglangScorer]:
    options = {"clock": SystemClock(), "timeout_s": 60.0, "fallback_context_len": 64, "ready_wait_s": 0.2} | options
    async with stub:
        scorer = SglangScorer(stub.url, **{"probe": PROBE, "retry_delays_s": (0.0, 0.0), **options})
        await scorer.start()
        stub.calls.clear()
        yield scorer
        await scorer.close()


def stub_with(*answers: Answer) -> SglangStub:
    stub = SglangStub(*(answers or (Answer(),)), decode=decode)
    stub.score = score_of
    return stub


def nothing_trained(session: str) -> TrainingSample:
    return replace(make_sample(session, [3, 4], [0, 1]), loss_mask=[0, 0])


async def test_scores_stand_at_their_tokens() -> None:
    stub = stub_with()
    async with teacher(stub) as scorer:
        assert scorer.model == "stub" and scorer.max_context_len == 32768
        scores = await scorer.score([*SAMPLES, nothing_trained("c")])
        assert len(stub.calls) == 2 and all(call["sampling_params"]["max_new_tokens"] == 0 for call in stub.calls)
    for sample, scores_T in zip(SAMPLES, scores[:2], strict=True):
        expected = [score_of(sample.token_ids, at) for at in np.flatnonzero(sample.loss_mask)]
        assert scores_T[np.asarray(sample.loss_mask) != 0].tolist() == expected
    assert scores[2].tolist() == [0, 0]


async def test_a_passing_fault_is_tried_again() -> None:
    stub = stub_with(Answer(), Answer(fault="500"), Answer(fault="bad_json"), Answer())
    async with teacher(stub) as scorer:
        stub.calls.append({})  # the first answer was that of the start
        scores = await scorer.score(SAMPLES[1:])
        assert len(stub.calls) == 4
    assert math.isfinite(scores[0][1])


async def test_what_cannot_be_scored_is_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    stub = stub_with()
    stub.server = {"max_req_input_len": 4}
    async with teacher(stub) as scorer:
        scores = await scorer.score(SAMPLES)
        assert [call["input_ids"] for call in stub.calls] == [[3, 9]]
        assert np.isnan(scores[0]).all() and np.isfinite(scores[1]).all()
        assert (
            "could not score 1 of 2 samples; the first: session a: it has 5 tokens, the server takes 4" in caplog.text
        )
        with pytest.raises(RunStopped, match=r"could not score any of the 1 samples .* session a: it has 5 tokens"):
            await scorer.score([*SAMPLES[:1], nothing_trained("c")])


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({"id": "other"}, "answered request 'other'"),
        ({"prompt_tokens": 1}, "read 1 ids where 2 were sent"),
        ({"input_token_logprobs": [[None, 3, None]]}, "holds 1 input_token_logprobs for ids 0 to 1"),
        ({"input_token_logprobs": [[None, 3, None], [None, 9, None]]}, "gives id 9 at place 1 the log-prob None"),
        ({"input_token_logprobs": [[None, 3, None], [0.5, 9, None]]}, "log-prob 0.5"),
        ({"input_token_logprobs": None}, "cannot be read"),
        ({"finish_reason": {"type": "abort", "message": "too busy"}}, "aborted the request: too busy"),
        (
            {"input_token_logprobs": [[None, 3, None], [-1, 8, None]]},
            "id 8 at place 1 where id 9 was sent; its",
        ),
    ],
)
async def test_an_answer_that_cannot_be_right_is_not_used(meta: dict[str, Any], said: str) -> None:
    stub = stub_with(Answer(), Answer(meta=meta))
    async with teacher(stub, retry_delays_s=()) as scorer:
        stub.calls.append({})
        with pytest.raises(RunStopped, match=said):
            await scorer.score(SAMPLES[1:])


async def test_a_refused_request_is_not_repeated_and_a_silent_server_is_given_up() -> None:
    stub = stub_with()
    async with teacher(stub) as scorer:
        stub.status = 400
        before = stub.num_requests
        with pytest.raises(RunStopped, match="answered status 400"):
            await scorer.score(SAMPLES[1:])
        assert stub.num_requests == before + 1
    stub, clock = stub_with(Answer(), Answer(fault="hang")), ManualClock()
    async with teacher(stub, clock=clock, timeout_s=30.0) as scorer:
        stub.calls.append({})
        scoring = asyncio.ensure_future(scorer.score(SAMPLES[1:]))
        await clock.until(scoring.done, step_s=20.0)
        with pytest.raises(RunStopped, match=r"no answer within 30 s \(--engine-timeout-s\)"):
            await scoring
        assert len(stub.calls) == 4


async def test_no_more_calls_than_allowed_run_at_once() -> None:
    stub = stub_with(Answer(), Answer(hold_at=0))
    async with teacher(stub, max_running=3) as scorer:
        stub.calls.append({})
        samples = [make_sample(f"s{i}", [3, 9], [0, 1]) for i in range(8)]
        scoring = asyncio.ensure_future(scorer.score(samples))
        seen = 0
        while not scoring.done():
            seen = max(seen, stub.num_held)
            if stub.num_held == min(3, 9 - len(stub.calls) + stub.num_held):
                stub.release()
            await asyncio.sleep(0.001)
        assert seen == 3 and len(await scoring) == 8


@pytest.mark.parametrize(
    ("words", "model", "said"),
    [
        ({**PROBE, 40: "cup"}, {}, "another tokenizer than --hf-checkpoint: it reads id 40 as 'cup', not as 'pot'"),
        (PROBE, {"is_generation": False}, "serves stub, which is no language model"),
    ],
)
async def test_a_server_that_cannot_be_the_teacher_is_refused_at_start(
    words: dict[int, str], model: dict[str, Any], said: str
) -> None:
    stub = SglangStub(Answer(), decode=lambda ids: words[ids[0]])
    assert stub.model is not None
    stub.model |= model
    with pytest.raises(ConfigError, match=said):
        async with teacher(stub):
            pass


async def test_a_server_with_fewer_ids_is_refused_at_start() -> None:
    stub = SglangStub(Answer(fault="500"), decode=decode)
    with pytest.raises(ConfigError, match=r"cannot score ids of the tokenizer of --hf-checkpoint: .* status 500"):
        async with teacher(stub):
            pass
