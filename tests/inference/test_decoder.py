"""The decoder computes what transformers computes, whole, in chunks, and one token at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import FAMILIES, build_model, random_ids, save_model

from silva.model.checkpoint import hf_config_dict, load_weights
from silva.model.config import DecoderConfig
from silva.model.decoder import Decoder, Segment, WeightsError
from silva.types.errors import ConfigError

CPU = torch.device("cpu")


def open_decoder(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = Decoder(DecoderConfig.from_hf(hf_config_dict(folder)), dtype=dtype, device=CPU)
    decoder.load(load_weights(folder))
    return decoder


def hf_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    model = build_model(family)
    decoder = open_decoder(save_model(model, tmp_path))
    ids = random_ids(90, 1)
    cache = decoder.new_cache(3)
    cache.ensure(90)
    whole = decoder.forward(ids, [Segment(1, 0, 90)], cache, range(90))
    expected = hf_logits(model, ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("slots", [(0, 1, 2), (1, 2, 4), (0, 3, 7)], ids=["dense", "a gap", "far apart"])
def test_mixed_steps_equal_the_full_forward(slots: tuple[int, ...], qwen3: tuple[Any, Path]) -> None:
    """Three sequences of different lengths decode together while a fourth one is prefilled in chunks."""
    model, folder = qwen3
    decoder = open_decoder(folder)
    cache = decoder.new_cache(8)
    sequences = [random_ids(length, seed) for seed, length in enumerate((20, 47, 33))]
    other = random_ids(40, 9)
    cache.ensure(64)
    for slot, ids in zip(slots, sequences, strict=True):
        decoder.forward(ids[:-10], [Segment(slot, 0, len(ids) - 10)], cache, [])
    got: list[list[torch.Tensor]] = [[], [], []]
    for step in range(10):
        segments = [Segment(slot, len(ids) - 10 + step, 1) for slot, ids in zip(slots, sequences, strict=True)]
        tokens = [ids[len(ids) - 10 + step] for ids in sequences]
        chunk = other[4 * step : 4 * step + 4]
        logits = decoder.forward(tokens + chunk, [*segments, Segment(5, 4 * step, 4)], cache, [0, 1, 2, 6])
        for rows, row in zip(got, logits, strict=False):
            rows.append(row)
    for ids, rows in zip(sequences, got, strict=True):
        torch.testing.assert_close(torch.stack(rows), hf_logits(model, ids)[-10:], atol=1e-4, rtol=0)
    torch.testing.assert_close(logits[3], hf_logits(model, other)[-1], atol=1e-4, rtol=0)


def test_cache_growth_and_copies_keep_what_is_cached(qwen3: tuple[Any, Path]) -> None:
    model, folder = qwen3
    decoder = open_decoder(folder)
    cache = decoder.new_cache(2)
    ids = random_ids(150, 3)
    cache.ensure(60)
    decoder.forward(ids[:60], [Segment(0, 0, 60)], cache, [])
    cache.ensure(150)
    assert 150 <= cache.num_positions <= 256
    cache.copy(0, 1, 0, 60)
    cache.scrub(0)
    logits = decoder.forward(ids[60:], [Segment(1, 60, 90)], cache, [89])
    torch.testing.assert_close(logits[0], hf_logits(model, ids)[-1], atol=1e-4, rtol=0)


def test_bfloat16_runs_close_to_float32(qwen3: tuple[Any, Path]) -> None:
    model, folder = qwen3
    decoder = open_decoder(folder, torch.bfloat16)
    cache = decoder.new_cache(1)
    cache.ensure(32)
    ids = random_ids(32, 4)
    logits = decoder.forward(ids, [Segment(0, 0, 32)], cache, range(32))
    expected = hf_logits(model, ids)
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().mean() < 0.05 * expected.std()


def test_sharded_checkpoints_load(tmp_path: Path) -> None:
    model = build_model("llama")
    save_model(model, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    weights = load_weights(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(weights[name], value), name
    min(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(ConfigError, match=r"lacks the weight files \['model-00001-of-"):
        load_weights(tmp_path)


def test_unusable_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        hf_config_dict(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        hf_config_dict(tmp_path)
    (tmp_path / "config.json").write_text('{\n "a": oops}')
    with pytest.raises(ConfigError, match=r"config\.json line 2: not valid JSON"):
        hf_config_dict(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"found \['pytorch_model\.bin'\]"):
        load_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        load_weights(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": "model.norm.weight"}, r"missing model\.norm\.weight"),
        ({"model.extra.weight": torch.ones(1)}, r"unknown model\.extra\.weight"),
        ({"model.norm.weight": torch.ones(31)}, r"model\.norm\.weight has shape \[31\], the config asks \[32\]"),
        ({"model.norm.weight": [1.0]}, r"model\.norm\.weight is a list"),
        (
            {"model.norm.weight": torch.full((32,), float("nan"))},
            r"model\.norm\.weight holds a value that is not finite",
        ),
        ({"lm_head.weight": torch.ones(260, 32)}, r"lm_head\.weight differs"),
    ],
)
def test_bad_weights_change_nothing(change: dict[str, Any], message: str, qwen3: tuple[Any, Path]) -> None:
    model, folder = qwen3
    decoder = open_decoder(folder)
    weights: dict[str, Any] = {name: value * 2 for name, value in model.state_dict().items()}
    weights.pop("lm_head.weight")
    weights.pop(change.pop("drop", None), None)
    with pytest.raises(WeightsError, match=message):
        decoder.load({**weights, **change})
    cache = decoder.new_cache(1)
    cache.ensure(8)
    ids = random_ids(8, 5)
    logits = decoder.forward(ids, [Segment(0, 0, 8)], cache, range(8))
    torch.testing.assert_close(logits, hf_logits(model, ids), atol=1e-4, rtol=0)


BASE = {
    "model_type": "qwen3",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "`model_type` is 'gpt2'"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "`architectures`"),
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"`rope_scaling\.rope_type` is 'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, r"`rope_parameters\.rope_type` is 'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "`factor` is None"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor` is 0.5"),
        ({"use_sliding_window": True, "sliding_window": 16}, "`use_sliding_window`"),
        ({"layer_types": ["sliding_attention"]}, "`layer_types`"),
        ({"model_type": "mistral", "sliding_window": 16}, "`sliding_window` is 16"),
        ({"quantization_config": {"bits": 4}}, "`quantization_config`"),
        ({"num_experts": 8}, "`num_experts` is 8"),
        ({"num_key_value_heads": 3}, "`num_key_value_heads` is 3"),
        ({"head_dim": 5}, "`head_dim` is 5"),
        ({"vocab_size": "many"}, "`vocab_size` is 'many'"),
        ({"hidden_size": None}, "`hidden_size` is None"),
        ({"rms_norm_eps": 0}, "`rms_norm_eps` is 0"),
        ({"tie_word_embeddings": "yes"}, "`tie_word_embeddings` is 'yes'"),
    ],
)
def test_configs_that_are_not_implemented_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    DecoderConfig.from_hf(BASE)
    with pytest.raises(ConfigError, match=named):
        DecoderConfig.from_hf({**BASE, **change})


def test_old_and_new_spellings_of_rope_agree() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}
    assert DecoderConfig.from_hf({**BASE, **old}).rope == DecoderConfig.from_hf({**BASE, **new}).rope
    assert DecoderConfig.from_hf({**BASE, "rope_theta": 5e5}).rope.theta == 5e5


def test_a_window_that_no_context_outgrows_is_accepted() -> None:
    assert DecoderConfig.from_hf({**BASE, "model_type": "mistral", "sliding_window": 64}).max_positions == 64
    assert DecoderConfig.from_hf({**BASE, "use_sliding_window": False, "sliding_window": 16}).qk_norm
