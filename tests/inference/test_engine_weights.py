"""New weights while requests run: old ones stay on any error, log-probs follow, cached prefixes do not survive."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import build_model, counter, generate, random_ids, reference_logprobs, save_model, until

from silva.model.folder_weights import FolderWeights
from silva.types.errors import EngineFault
from silva.types.generation import VersionSpan
from silva.types.weights import MemoryWeights

Model = tuple[Any, Path]


@pytest.mark.parametrize("family", ["qwen3-tied", "qwen2", "llama-biases-rope3"])
async def test_an_update_in_mid_decode_takes_effect_at_once(family: str, tmp_path: Path, start_engine: Any) -> None:
    old, new = build_model(family, seed=1), build_model(family, seed=2)
    engine = await start_engine(save_model(old, tmp_path))
    prompts = [random_ids(20, 1), random_ids(20, 1), random_ids(9, 2)]
    options = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 120}
    tasks = [asyncio.create_task(generate(engine, ids, **options)) for ids in prompts]
    await until(lambda: counter(engine, "sampled_tokens") >= 30)
    await engine.load_weights(MemoryWeights(named=new.state_dict(), version=7))
    assert engine.version == 7
    for prompt, result in zip(prompts, await asyncio.gather(*tasks), strict=True):
        before, after = result.version_spans
        assert (before.version, after.version) == (0, 7)
        cut = after.start
        assert 0 < cut < 120
        expected = reference_logprobs(old, prompt, result.ids[:cut], 0.7)
        expected += reference_logprobs(new, prompt + result.ids[:cut], result.ids[cut:], 0.7)
        assert result.logprobs == pytest.approx(expected, abs=1e-3)
    # The two requests with the same prompt shared it again.
    assert counter(engine, "reprefill_tokens") < 20 + 9 + sum(3 * [60])
    fresh = await generate(engine, prompts[0], **options)
    assert fresh.version_spans == (VersionSpan(start=0, length=120, version=7),)
    assert fresh.logprobs == pytest.approx(reference_logprobs(new, prompts[0], fresh.ids, 0.7), abs=1e-3)


async def test_cached_prefixes_belong_to_one_version(qwen3: Model, start_engine: Any) -> None:
    model, folder = qwen3
    engine = await start_engine(folder)
    prompt = random_ids(40, 1)
    first = await generate(engine, prompt, session="s")
    await engine.load_weights(MemoryWeights(named=model.state_dict(), version=1))
    second = await generate(engine, prompt + first.ids, session="s")
    assert second.cached_tokens == 0
    third = await generate(engine, prompt + first.ids + second.ids, session="s")
    assert third.cached_tokens == len(prompt) + len(first.ids) + len(second.ids) - 1


async def test_wrong_weights_leave_the_old_ones_in_place(qwen3: Model, start_engine: Any) -> None:
    model, folder = qwen3
    engine = await start_engine(folder)
    prompt = random_ids(10, 1)
    task = asyncio.create_task(generate(engine, prompt, max_new_tokens=200))
    await until(lambda: counter(engine, "sampled_tokens") > 3)
    good = {name: value * 1.5 for name, value in model.state_dict().items() if name != "lm_head.weight"}
    missing = dict(list(good.items())[1:])
    wrong = {**good, "model.norm.weight": torch.ones(3)}
    for weights, message in ((missing, "missing model.embed_tokens.weight"), (wrong, r"has shape \[3\]")):
        with pytest.raises(EngineFault, match=rf"weight version 5 was not loaded: .*{message}"):
            await engine.load_weights(MemoryWeights(named=weights, version=5))
    assert engine.version == 0
    result = await task
    assert result.version_spans == (VersionSpan(start=0, length=200, version=0),)
    assert result.logprobs == pytest.approx(reference_logprobs(model, prompt, result.ids, 1.0), abs=1e-3)


async def test_the_engine_owns_its_copy(qwen3: Model, start_engine: Any) -> None:
    model, folder = qwen3
    engine = await start_engine(folder)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    await engine.load_weights(MemoryWeights(named=weights, version=1))
    for value in weights.values():
        value.fill_(float("nan"))
    prompt = random_ids(10, 1)
    result = await generate(engine, prompt)
    assert result.logprobs == pytest.approx(reference_logprobs(model, prompt, result.ids, 1.0), abs=1e-3)


async def test_logits_that_are_not_finite_are_a_fault_and_leave_no_trace(qwen3: Model, start_engine: Any) -> None:
    model, folder = qwen3
    engine = await start_engine(folder, num_slots=2)
    huge = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in huge.items():
        if "input_layernorm" in name:
            value.fill_(1e38)  # finite itself, but keys and values overflow
    await engine.load_weights(MemoryWeights(named=huge, version=1))
    for outcome in await asyncio.gather(
        *(generate(engine, random_ids(60, i)) for i in range(2)), return_exceptions=True
    ):
        assert isinstance(outcome, EngineFault)
        assert "not finite (weight version 1)" in str(outcome)
    await engine.load_weights(MemoryWeights(named=model.state_dict(), version=2))
    # A short request decodes beside a long one: what it masks must not hold a stale NaN.
    prompts = [random_ids(4, 3), random_ids(70, 4)]
    results = await asyncio.gather(*(generate(engine, ids) for ids in prompts))
    for ids, result in zip(prompts, results, strict=True):
        assert result.logprobs == pytest.approx(reference_logprobs(model, ids, result.ids, 1.0), abs=1e-3)


async def test_a_folder_is_a_source_like_tensors_in_memory(qwen3: Model, start_engine: Any, tmp_path: Path) -> None:
    _, folder = qwen3
    other = build_model("qwen3-tied", seed=5)
    source = FolderWeights(folder=save_model(other, tmp_path / "other"), version=3)
    memory = MemoryWeights(named=other.state_dict(), version=3)
    stored = {name: shape for name, shape in memory.shapes().items() if name in source.shapes()}
    assert source.shapes() == stored == {name: tuple(tensor.shape) for name, tensor in source.tensors()}
    assert source.folder == tmp_path / "other" and memory.folder is None
    engine = await start_engine(folder)
    await engine.load_weights(source)
    prompt = random_ids(10, 1)
    result = await generate(engine, prompt)
    assert result.version_spans == (VersionSpan(start=0, length=len(result.ids), version=3),)
    assert result.logprobs == pytest.approx(reference_logprobs(other, prompt, result.ids, 1.0), abs=1e-3)
    with pytest.raises(EngineFault, match=r"weight version 4 was not loaded: .*no model\.safetensors"):
        await engine.load_weights(FolderWeights(folder=tmp_path, version=4))
    assert engine.version == 3
