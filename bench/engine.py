"""Decode speed of the torch engine beside `transformers.generate`, in one process on one thread.

    PYTHONPATH=src python bench/engine.py [--model DIR] [--tokens 128] [--dtype float32]

Without `--model` it builds a random Qwen3-shaped model of about 0.46 million parameters. Prints one JSON line for each
number of parallel requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from silva.model import torch_env

torch_env.prepare()

import torch  # noqa: E402
import transformers  # noqa: E402

from silva.inference.torch_engine import TorchEngine  # noqa: E402
from silva.types.generation import GenerateRequest, SamplingParams  # noqa: E402

PROMPT_LEN = 32


def tiny_model(folder: Path) -> Path:
    """A random model of 0.46 M parameters, saved as a Hugging Face directory."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=371,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def prompts(count: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, vocab_size, (count, PROMPT_LEN), generator=generator).tolist()


async def engine_rate(engine: TorchEngine, inputs: list[list[int]], tokens: int, label: str) -> float:
    """Sampled tokens a second over `inputs` in parallel, prefill included."""

    async def one(number: int, ids: list[int]) -> int:
        sampling = SamplingParams(max_new_tokens=tokens, temperature=1.0)
        request = GenerateRequest(
            request_id=f"{label}-{number}-", session_id=f"{label}-{number}", input_ids=ids, sampling=sampling
        )
        return len((await engine.generate(request)).ids)

    started = time.perf_counter()
    total = sum(await asyncio.gather(*(one(i, ids) for i, ids in enumerate(inputs))))
    return total / (time.perf_counter() - started)


def transformers_rate(model: Any, inputs: list[list[int]], tokens: int) -> float:
    batch = torch.tensor(inputs)
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=True,
            top_k=0,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
            eos_token_id=None,
        )
    return (out.shape[1] - batch.shape[1]) * len(inputs) / (time.perf_counter() - started)


async def measure(model_dir: Path, dtype: str, tokens: int, repeats: int) -> None:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()
    engine = TorchEngine(model_dir, decode_text=lambda ids: "", dtype=dtype, device="cpu")
    await engine.start()
    try:
        for count in (1, 8, 32):
            inputs = prompts(count, model.config.vocab_size)
            ours = [await engine_rate(engine, inputs, tokens, f"r{count}x{i}") for i in range(repeats)]
            theirs = [await asyncio.to_thread(transformers_rate, model, inputs, tokens) for _ in range(repeats)]
            row = {
                "parameters": sum(p.numel() for p in model.parameters()),
                "dtype": dtype,
                "requests": count,
                "engine_tok_s": round(max(ours), 1),
                "transformers_tok_s": round(max(theirs), 1),
                "ratio": round(max(ours) / max(theirs), 2),
            }
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = args.model or tiny_model(Path(scratch))
        asyncio.run(measure(model_dir, args.dtype, args.tokens, args.repeats))


if __name__ == "__main__":
    main()
