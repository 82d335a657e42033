"""Small real models and samples for the tests of the training core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from spans import responses_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM

from silva.types.generation import VersionSpan
from silva.types.rollout import TrainingSample

VOCAB = 48
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(folder: Path, kind: str = "qwen2", **overrides: Any) -> Path:
    """A model directory of the given architecture with random weights large enough that attention matters."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(COMMON | overrides))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def write_least_model(folder: Path, **overrides: Any) -> Path:
    """One layer over 32 ids: the least that has a loss and a gradient."""
    least = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return write_model(folder, **(least | {"num_attention_heads": 2, "num_key_value_heads": 1} | overrides))


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w2", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")


def make_sample(
    session: str,
    token_ids: list[int],
    mask: list[int],
    *,
    credit: float | None = 1.0,
    logprobs: list[float] | None = None,
    name: str | None = None,
) -> TrainingSample:
    spans: list[VersionSpan] = []
    for at, bit in enumerate(mask):
        spans.append(VersionSpan(start=at, length=1, version=0 if bit else -1))
    return TrainingSample(
        session_id=session,
        group_id="g",
        name=name,
        node_id=0,
        prompt_len=1,
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=logprobs or [-1.0 * bit for bit in mask],
        kept_mass=[1.0] * len(mask),
        version_spans=tuple(spans),
        responses=responses_of(mask),
        reward=0.0,
        credit=credit,
    )


def random_samples(seed: int = 0, num_sessions: int = 5, max_len: int = 14) -> list[TrainingSample]:
    """Samples of several turns with mixed lengths and credits; every third session has two contexts."""
    rng = np.random.default_rng(seed)
    samples: list[TrainingSample] = []
    for s in range(num_sessions):
        credit = float(rng.normal())
        for c in range(2 if s % 3 == 0 else 1):
            length = int(rng.integers(3, max_len))
            mask = [0, *(int(bit) for bit in rng.integers(0, 2, length - 1))]
            mask[-1] = 1
            ids = [int(i) for i in rng.integers(0, VOCAB, length)]
            logprobs = [float(-rng.exponential()) * bit for bit in mask]
            samples.append(make_sample(f"s{s}", ids, mask, credit=credit, logprobs=logprobs, name=f"c{c}"))
    return samples
