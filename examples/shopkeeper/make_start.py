"""Makes the shopkeeper's start: a small model that can use its tool but has got into the habit of not doing so.

    python3 examples/shopkeeper/make_start.py --out runs/shopkeeper/start --seed 1

writes `model/` (a Hugging Face folder: about 0.4 M Qwen3-shaped parameters and their own tokenizer), `train.jsonl` and
`eval.jsonl`. It takes less than a minute on one core, needs no network, and the same seed gives the same files.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dialogues
import start_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CONTEXT_LEN = 256


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer taught on the task's own dialogues."""
    return start_model.make_tokenizer(_tokenizer_texts(), vocab_size=512, context_len=CONTEXT_LEN)


def _tokenizer_texts() -> list[str]:
    """The plain texts that stand between added tokens: every item in every known phrasing and in a call."""
    texts = ["system\ntools: lookup(item)", "user\n", "assistant\n", dialogues.GIVE_UP, dialogues.NO_SUCH_ITEM] * 100
    for item in dialogues.ITEMS:
        arguments = dialogues.call(item)["tool_calls"][0]["function"]["arguments"]
        texts += [f'\n{{"name": "lookup", "arguments": {arguments}}}\n'] * 20
        texts += [dialogues.question(item, phrasing)["content"] for phrasing in dialogues.TRAIN_PHRASINGS] * 4
    return texts


def encode_dialogue(tokenizer: PreTrainedTokenizerFast, messages: list[dialogues.Message]) -> start_model.Encoded:
    return start_model.encode_dialogue(tokenizer, messages, [dialogues.LOOKUP_TOOL])


def write_datasets(
    out: Path, seed: int, train_pairs: list[dialogues.Pair], eval_pairs: list[dialogues.Pair], *, num_train: int
) -> None:
    """`train.jsonl`: `num_train` rows of known pairs and phrasings. `eval.jsonl`: held-out pairs and phrasings."""
    rng = random.Random(f"datasets {seed}")
    train = [
        dialogues.dataset_row(rng.choice(train_pairs), rng.choice(dialogues.TRAIN_PHRASINGS)) for _ in range(num_train)
    ]
    held_out = [
        dialogues.dataset_row(pair, dialogues.EVAL_PHRASINGS[i % len(dialogues.EVAL_PHRASINGS)])
        for i, pair in enumerate(rng.sample(eval_pairs, len(eval_pairs)))
    ]
    for name, rows in (("train", train), ("eval", held_out)):
        start_model.write_jsonl(out / f"{name}.jsonl", rows)


def make_start(
    out: Path,
    seed: int,
    *,
    clean_steps: int = 300,
    lazy_steps: int = 80,
    num_dialogues: int = 4096,
    log: Callable[[str], None] = print,
) -> None:
    """Write `model/`, `train.jsonl` and `eval.jsonl` under `out`. Deterministic on one machine for one seed.

    Each phase draws its supervised steps from `num_dialogues` dialogues of its own.
    """
    start_model.settle(seed)
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    train_pairs, eval_pairs = dialogues.split_pairs(random.Random(f"pairs {seed}"))
    write_datasets(out, seed, train_pairs, eval_pairs, num_train=2048)

    tokenizer = make_tokenizer()
    model = start_model.make_model(tokenizer, context_len=CONTEXT_LEN)
    log(f"model: {model.num_parameters() / 1e6:.2f} M parameters, {len(tokenizer)} tokens")
    for name, dialogue, num_steps, batch_size, lr in (
        ("phase 1, clean dialogues", dialogues.clean_dialogue, clean_steps, 16, 3e-3),
        ("phase 2, the bad habit", dialogues.lazy_dialogue, lazy_steps, 48, 1e-3),
    ):
        log(name)
        pool = [dialogue(rng, train_pairs) for _ in range(num_dialogues)]
        examples = [encode_dialogue(tokenizer, messages) for messages in pool]
        start_model.teach(
            model, tokenizer, examples, rng, num_steps=num_steps, batch_size=batch_size, lr=lr, warmup=20, log=log
        )
    start_model.save(model, tokenizer, out / "model")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the shopkeeper's start model and datasets.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write model/, train.jsonl and eval.jsonl to")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, dialogues and datasets (default 1)")
    options = parser.parse_args(argv)
    started, started_cpu = time.monotonic(), time.process_time()
    make_start(options.out, options.seed)
    took = f"{time.monotonic() - started:.0f} s ({time.process_time() - started_cpu:.0f} s of CPU)"
    print(f"{options.out}: model/, train.jsonl and eval.jsonl written in {took}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
