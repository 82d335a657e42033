"""Tiny random models on disk, and helpers to drive an engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from silva.inference.torch_engine import TorchEngine
from silva.types.generation import GenerateRequest, GenerateResult, SamplingParams

VOCAB = 260  # ids below 256 are bytes
CONTEXT = 256

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

FAMILIES: dict[str, tuple[type[transformers.PreTrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": False}),
    "llama-biases-rope3": (
        transformers.LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "llama-rope-linear": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}, "num_key_value_heads": 4},
    ),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": False}),
    "qwen2-tied": (transformers.Qwen2Config, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen3-tied": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
}


def build_model(family: str, seed: int = 0) -> Any:
    """A random transformers model whose biases and norms are random too."""
    config_class, extra = FAMILIES[family]
    options = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.25,
        **extra,
    }
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.2)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
    return model


def save_model(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def random_ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator).tolist()


def decode_latin(ids: list[int]) -> str:
    return bytes(id_ for id_ in ids if id_ < 256).decode("latin-1")


def decode_bytes(ids: list[int]) -> str:
    return bytes(id_ for id_ in ids if id_ < 256).decode("utf-8", errors="replace")


def reference_logprobs(model: Any, prompt: list[int], ids: list[int], temperature: float) -> list[float]:
    """Log-probs of `ids` after `prompt` from one transformers forward, under softmax(logits / T)."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()


_numbers = itertools.count()


def request(ids: list[int], *, session: str | None = None, resumed: int = 0, **sampling: Any) -> GenerateRequest:
    number = next(_numbers)
    return GenerateRequest(
        request_id=f"request-{number}-",
        session_id=session or f"session-{number}",
        input_ids=ids,
        sampling=SamplingParams(**{"max_new_tokens": 16, **sampling}),
        num_resumed=resumed,
    )


async def generate(engine: TorchEngine, ids: list[int], **options: Any) -> GenerateResult:
    return await engine.generate(request(ids, **options))


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop and the engine's thread go on until the condition holds."""
    while not condition():  # noqa: ASYNC110  (the condition changes in another thread)
        await asyncio.sleep(0.0005)


def counter(engine: TorchEngine, name: str) -> int:
    return engine.usage().counters[name]
