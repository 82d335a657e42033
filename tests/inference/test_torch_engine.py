"""The torch engine through its asyncio door: batching, prefix reuse, seeds, stops, aborts, faults."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import (
    CONTEXT,
    VOCAB,
    build_model,
    counter,
    decode_bytes,
    decode_latin,
    generate,
    random_ids,
    reference_logprobs,
    request,
    save_model,
    until,
)

from silva.inference.engine import Engine
from silva.inference.torch_engine import TorchEngine
from silva.types.errors import ConfigError, EngineFault, RequestError
from silva.types.generation import Media, VersionSpan

Model = tuple[Any, Path]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_recorded_logprobs_are_those_of_transformers(temperature: float, qwen3: Model, start_engine: Any) -> None:
    model, folder = qwen3
    engine: Engine = await start_engine(folder)
    inputs = [random_ids(5 + 7 * i, i) for i in range(6)]
    results = await asyncio.gather(
        *(generate(engine, ids, temperature=temperature, top_p=0.9, max_new_tokens=30) for ids in inputs)
    )
    for ids, result in zip(inputs, results, strict=True):
        expected = reference_logprobs(model, ids, result.ids, temperature)
        assert result.logprobs == pytest.approx(expected, abs=1e-3)
        assert all(0.9 - 1e-6 <= mass <= 1.0 for mass in result.kept_mass)
        assert any(mass < 1.0 for mass in result.kept_mass)
        assert result.version_spans == (VersionSpan(start=0, length=30, version=0),)
        assert result.finish_reason == "length"


async def test_temperature_zero_is_greedy(qwen3: Model, start_engine: Any) -> None:
    model, folder = qwen3
    engine = await start_engine(folder)
    prompt = random_ids(12, 1)
    result = await generate(engine, prompt, temperature=0.0, max_new_tokens=20)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + result.ids])).logits[0, len(prompt) - 1 : -1]
    assert result.ids == logits.argmax(-1).tolist()
    assert result.logprobs == pytest.approx(reference_logprobs(model, prompt, result.ids, 1.0), abs=1e-3)


async def test_requests_that_arrive_at_different_steps_share_decode_steps(qwen3: Model, start_engine: Any) -> None:
    engine = await start_engine(qwen3[1])
    tasks = []
    for i in range(8):
        tasks.append(asyncio.create_task(generate(engine, random_ids(10, i), max_new_tokens=150)))
        await until(lambda n=i: counter(engine, "sampled_tokens") > 4 * n)
    results = await asyncio.gather(*tasks)
    counters = engine.usage().counters
    assert all(len(result.ids) == 150 for result in results)
    assert counters["sampled_tokens"] == 8 * 150
    assert counters["decode_rows"] == 8 * 149
    assert counters["max_decode_rows"] == 8
    assert counters["decode_steps"] < 8 * 149 / 2
    assert counters["prefill_tokens"] == 80


async def test_a_second_turn_prefills_only_its_new_ids(qwen3: Model, start_engine: Any) -> None:
    model, folder = qwen3
    engine = await start_engine(folder)
    prompt, tail = random_ids(60, 1), random_ids(15, 2)
    first = await generate(engine, prompt, session="s", max_new_tokens=20)
    before = counter(engine, "prefill_tokens")
    history = prompt + first.ids + tail
    second = await generate(engine, history, session="s", max_new_tokens=20)
    # The last sampled id never went through the model: it counts with the new ids.
    assert counter(engine, "prefill_tokens") - before == len(tail) + 1
    assert second.cached_tokens == len(prompt) + len(first.ids) - 1
    assert second.logprobs == pytest.approx(reference_logprobs(model, history, second.ids, 1.0), abs=1e-3)


async def test_a_branch_reuses_what_it_shares(qwen3: Model, start_engine: Any) -> None:
    model, folder = qwen3
    engine = await start_engine(folder, num_slots=1)
    prompt = random_ids(60, 1)
    await generate(engine, prompt, session="s", max_new_tokens=20)
    branch = prompt[:40] + random_ids(10, 3)
    result = await generate(engine, branch, session="s", max_new_tokens=20)
    assert result.cached_tokens == 40
    assert result.logprobs == pytest.approx(reference_logprobs(model, branch, result.ids, 1.0), abs=1e-3)


async def test_samples_of_one_prompt_share_its_prefill(qwen3: Model, start_engine: Any) -> None:
    model, folder = qwen3
    engine = await start_engine(folder, prefill_chunk=32)
    prompt = random_ids(100, 1)
    results = await asyncio.gather(*(generate(engine, prompt, max_new_tokens=12) for _ in range(8)))
    assert counter(engine, "prefill_tokens") == 100 + 7
    assert sorted(result.cached_tokens for result in results) == [0] + [99] * 7
    assert len({tuple(result.ids) for result in results}) == 8
    for result in results:
        assert result.logprobs == pytest.approx(reference_logprobs(model, prompt, result.ids, 1.0), abs=1e-3)


async def test_a_seed_gives_the_same_ids_alone_and_in_a_batch(qwen3: Model, start_engine: Any) -> None:
    _, folder = qwen3
    prompts = [random_ids(10 + i, i) for i in range(6)]
    kinds = [{"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.2, "top_k": 20}, {}]
    options = [{"seed": i // 2, "max_new_tokens": 40, **kinds[i % 3]} for i in range(6)]
    engine = await start_engine(folder)
    together = await asyncio.gather(
        *(generate(engine, ids, **kind) for ids, kind in zip(prompts, options, strict=True)),
        *(generate(engine, random_ids(30, 99 + i)) for i in range(5)),
    )
    other = await start_engine(folder, seed=123, num_slots=3)
    for ids, kind, result in zip(prompts, options, together, strict=False):
        alone = await generate(other, ids, **kind)
        assert alone.ids == result.ids
        assert alone.logprobs == pytest.approx(result.logprobs, abs=1e-4)


async def test_requests_without_a_seed_follow_engine_seed_and_request_id(qwen3: Model, start_engine: Any) -> None:
    _, folder = qwen3
    one, two = request(random_ids(9, 1)), request(random_ids(9, 1))
    same, other = await start_engine(folder, seed=1), await start_engine(folder, seed=2)
    first = (await same.generate(one)).ids
    assert (await same.generate(one)).ids == first
    assert (await same.generate(two)).ids != first
    assert (await other.generate(one)).ids != first


async def test_an_abort_in_mid_decode_resumes_to_the_same_total(qwen3: Model, start_engine: Any) -> None:
    _, folder = qwen3
    engine = await start_engine(folder)
    prompt = random_ids(20, 1)
    sampling = {"seed": 11, "temperature": 0.8, "top_p": 0.95}
    whole = await generate(engine, prompt, max_new_tokens=200, **sampling)
    ids, aborted = [], 0
    while len(ids) < 200:
        attempt = request(prompt + ids, session="r", resumed=len(ids), max_new_tokens=200 - len(ids), **sampling)
        before = counter(engine, "sampled_tokens")
        task = asyncio.create_task(engine.generate(attempt))
        if aborted < 2:
            await until(lambda start=before: counter(engine, "sampled_tokens") >= start + 20)
            await engine.abort(attempt.request_id)
        result = await task
        aborted += result.finish_reason == "abort"
        ids += result.ids
    assert aborted == 2
    assert counter(engine, "aborts") == 2
    assert ids == whole.ids
    # Resumed attempts found their prefix in the session's slot.
    assert result.cached_tokens == len(prompt) + 200 - len(result.ids) - 1


async def test_an_abort_in_the_queue_returns_no_ids(qwen3: Model, start_engine: Any) -> None:
    engine = await start_engine(qwen3[1], num_slots=1)
    first = asyncio.create_task(generate(engine, random_ids(5, 1), max_new_tokens=240))
    await until(lambda: counter(engine, "sampled_tokens") > 0)
    waiting = request(random_ids(5, 2))
    second = asyncio.create_task(engine.generate(waiting))
    await until(lambda: engine.usage().num_waiting == 1)
    await engine.abort(waiting.request_id)
    await engine.abort("nobody")
    result = await second
    assert (result.ids, result.finish_reason, result.version_spans) == ([], "abort", ())
    assert len((await first).ids) == 240


async def test_a_cancelled_generate_frees_its_slot(qwen3: Model, start_engine: Any) -> None:
    engine = await start_engine(qwen3[1], num_slots=1)
    slow = request(random_ids(5, 1), max_new_tokens=240)
    task = asyncio.create_task(engine.generate(slow))
    await until(lambda: counter(engine, "sampled_tokens") > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # The same request id may come back at once; it does not get the outcome of the cancelled one.
    again = await engine.generate(slow)
    assert len(again.ids) == 240
    assert counter(engine, "cancelled") == 1
    assert engine.usage().num_running == 0


async def test_more_requests_than_slots_are_served_in_order(qwen3: Model, start_engine: Any) -> None:
    engine = await start_engine(qwen3[1], num_slots=2)
    finished: list[int] = []

    async def one(number: int) -> None:
        await generate(engine, random_ids(6, number), max_new_tokens=10)
        finished.append(number)

    await asyncio.gather(*(one(i) for i in range(7)))
    assert sorted(finished) == list(range(7))
    assert all(abs(number - at) <= 1 for at, number in enumerate(finished))
    assert counter(engine, "max_decode_rows") == 2


async def test_stop_ids_of_engine_and_request_end_with_the_id(qwen3: Model, start_engine: Any) -> None:
    _, folder = qwen3
    engine = await start_engine(folder)
    prompt = random_ids(8, 1)
    free = (await generate(engine, prompt, seed=3, max_new_tokens=40)).ids
    stop_id = free[25]
    cut = free[: free.index(stop_id) + 1]
    by_request = await generate(engine, prompt, seed=3, max_new_tokens=40, stop_token_ids=(stop_id,))
    stopping = await start_engine(folder, stop_ids=[stop_id])
    by_engine = await generate(stopping, prompt, seed=3, max_new_tokens=40)
    for result in (by_request, by_engine):
        assert (result.ids, result.finish_reason, result.matched_stop) == (cut, "stop", stop_id)


async def test_stop_strings_keep_the_ids_up_to_the_one_that_completes_them(qwen3: Model, start_engine: Any) -> None:
    engine = await start_engine(qwen3[1], decode_text=decode_latin)
    prompt = random_ids(8, 1)
    free = (await generate(engine, prompt, seed=4, max_new_tokens=40)).ids
    for at in (0, 7, 20, 36):
        stop = decode_latin(free[at : at + 3])
        need = next(n for n in range(1, 41) if stop in decode_latin(free[:n]))
        result = await generate(engine, prompt, seed=4, max_new_tokens=40, stop=("never in there", stop))
        assert (result.ids, result.finish_reason, result.matched_stop) == (free[:need], "stop", stop)
        # A resumed attempt sees the stop string that began in the ids of the attempt before it.
        have = need - 1
        rest = await generate(engine, prompt + free[:have], seed=4, resumed=have, max_new_tokens=40, stop=(stop,))
        assert (rest.ids, rest.matched_stop) == (free[have:need], stop)


async def test_the_context_limit_ends_a_response(qwen3: Model, start_engine: Any) -> None:
    engine = await start_engine(qwen3[1], max_context_len=40)
    assert engine.max_context_len == 40
    result = await generate(engine, random_ids(30, 1), max_new_tokens=100)
    assert (len(result.ids), result.finish_reason) == (10, "length")
    full = await generate(engine, random_ids(39, 1), max_new_tokens=100)
    assert len(full.ids) == 1
    with pytest.raises(RequestError, match="holds 40 ids; the context of 40") as caught:
        await generate(engine, random_ids(40, 1))
    assert caught.value.code == "context_length_exceeded"


async def test_unusable_requests_are_refused_and_the_engine_goes_on(qwen3: Model, start_engine: Any) -> None:
    engine = await start_engine(qwen3[1])
    with pytest.raises(RequestError, match="input_ids is empty"):
        await generate(engine, [])
    for bad in (VOCAB, -1, 2**70, "x"):
        with pytest.raises(RequestError, match=rf"input_ids\[1\] is {bad!r}"):
            await generate(engine, [1, bad, 2])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="empty string"):
        await generate(engine, [1], stop=("",))
    image = Media(kind="image", digest="0" * 64, url="https://example.org/a.png")
    assert engine.image_support == "none"
    with pytest.raises(EngineFault, match="carries images"):
        base = request([1])
        await engine.generate(
            type(base)(request_id="m", session_id="m", input_ids=[1], sampling=base.sampling, media=(image,))
        )
    slow = request([1, 2], max_new_tokens=200)
    task = asyncio.create_task(engine.generate(slow))
    await until(lambda: counter(engine, "sampled_tokens") > 0)
    with pytest.raises(EngineFault, match="already running"):
        await engine.generate(slow)
    assert len((await task).ids) == 200


async def test_a_fault_in_a_step_fails_the_pending_requests_and_no_later_ones(qwen3: Model, start_engine: Any) -> None:
    def broken(ids: list[int]) -> str:
        raise RuntimeError("no such tokenizer")

    engine = await start_engine(qwen3[1], decode_text=broken)
    outcomes = await asyncio.gather(
        generate(engine, random_ids(5, 1), max_new_tokens=200),
        generate(engine, random_ids(5, 2), stop=("x",)),
        return_exceptions=True,
    )
    for outcome in outcomes:
        assert isinstance(outcome, EngineFault)
        assert "no such tokenizer" in str(outcome)
    assert len((await generate(engine, random_ids(5, 1), max_new_tokens=7)).ids) == 7
    assert counter(engine, "faults") == 2


class Unreadable:
    """Weights whose tensors cannot be read."""

    version = 7

    def tensors(self) -> Iterator[tuple[str, Any]]:
        raise OSError("the disk is gone")


async def test_a_fault_while_weights_are_loaded_reaches_whoever_waits_for_them(qwen3: Model, start_engine: Any) -> None:
    engine = await start_engine(qwen3[1])
    with pytest.raises(EngineFault, match="the disk is gone"):
        await asyncio.wait_for(engine.load_weights(Unreadable()), 10)
    assert engine.version == 0 and len((await generate(engine, random_ids(5, 1), max_new_tokens=7)).ids) == 7


async def test_closing_a_session_frees_its_cache(qwen3: Model, start_engine: Any) -> None:
    engine = await start_engine(qwen3[1])
    await generate(engine, random_ids(30, 1), session="a")
    running = asyncio.create_task(generate(engine, random_ids(30, 2), session="b", max_new_tokens=100))
    await until(lambda: counter(engine, "sampled_tokens") > 20)
    assert engine.usage().kv_used_ratio > 0
    for session in ("a", "b", "unknown"):
        await engine.close_session(session)
    assert len((await running).ids) == 100
    assert engine.usage().kv_used_ratio == 0


async def test_close_fails_what_is_pending_and_ends_the_thread(qwen3: Model) -> None:
    engine = TorchEngine(qwen3[1], decode_text=decode_bytes, device="cpu")
    with pytest.raises(EngineFault, match="not running"):
        await generate(engine, [1])
    await engine.start()
    task = asyncio.create_task(generate(engine, random_ids(5, 1), max_new_tokens=240))
    await until(lambda: counter(engine, "sampled_tokens") > 0)
    await engine.close()
    with pytest.raises(EngineFault, match="closed"):
        await task
    await engine.close()
    with pytest.raises(EngineFault, match="not running"):
        await generate(engine, [1])


async def test_start_up_errors_name_the_directory(tmp_path: Path) -> None:
    model = build_model("llama")
    save_model(model, tmp_path)
    with pytest.raises(ConfigError, match=f"max_context_len is {CONTEXT + 1}"):
        TorchEngine(tmp_path, decode_text=decode_bytes, max_context_len=CONTEXT + 1)
    (tmp_path / "model.safetensors").unlink()
    engine = TorchEngine(tmp_path, decode_text=decode_bytes)
    with pytest.raises(ConfigError, match=r"holds no model\.safetensors"):
        await engine.start()
    await engine.close()
