"""Makes the start of the search agents: a model that can search, read and delegate but mostly answers "unknown".

    python3 examples/search_r1/make_start.py --out runs/search_r1/start --seed 1

writes `model/` (a Hugging Face folder: 0.44 M Qwen3-shaped parameters and their own tokenizer), `corpus.jsonl` for the
search service, and the datasets `train.jsonl`, `eval.jsonl`, `team_train.jsonl` and `team_eval.jsonl`. It takes about a
minute on one core, needs no network, and the same seed gives the same files.
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

import facts
import lessons
import start_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CONTEXT_LEN = 256


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer in which every name, attribute and value is one token."""
    return start_model.make_tokenizer(_tokenizer_texts(), vocab_size=1024, context_len=CONTEXT_LEN)


def _tokenizer_texts() -> list[str]:
    """The plain texts that stand between added tokens: questions, documents, calls and answers."""
    heads = ["system\ntools: search(query)", "system\ntools: ask_searcher(question)", "user\n", "assistant\n"]
    texts = [*heads, lessons.GIVE_UP, lessons.NOTHING_FOUND] * 100
    for name in facts.NAMES:
        for attribute, values in facts.VALUES.items():
            fact = facts.Fact(name, attribute, values[0])
            texts += [facts.question(fact, phrasing) for phrasing in facts.TRAIN_PHRASINGS]
            texts.append(f'\n{{"name": "search", "arguments": {{"query": "{facts.query(fact)}"}}}}\n')
            asked = facts.colleague_question(fact)
            texts.append(f'\n{{"name": "ask_searcher", "arguments": {{"question": "{asked}"}}}}\n')
            texts += [facts.pair_question(fact, fact, phrasing) for phrasing in facts.TRAIN_PAIR_PHRASINGS]
    for attribute, values in facts.VALUES.items():
        for value in values:
            said = [facts.document(facts.Fact("", attribute, value), sentence) for sentence in facts.SENTENCES]
            texts += [*said, value, facts.pair_answer(value, value)] * 20
    return texts


def encode(tokenizer: PreTrainedTokenizerFast, lesson: lessons.Lesson) -> start_model.Encoded:
    messages, tools = lesson
    return start_model.encode_dialogue(tokenizer, messages, tools)


def write_datasets(
    out: Path, seed: int, known: list[facts.Fact], held_out: list[facts.Fact], *, num_train: int, num_team_eval: int
) -> None:
    """Four JSONL files: training rows about `known` facts, eval rows about `held_out` ones in their own phrasings."""
    rng = random.Random(f"datasets {seed}")
    train = [facts.single_row(rng.choice(known), rng.choice(facts.TRAIN_PHRASINGS)) for _ in range(num_train)]
    asked = [(fact, rng.choice(facts.EVAL_PHRASINGS)) for fact in held_out for _ in range(2)]
    team_train = [
        facts.team_row(*facts.draw_pair(rng, known), rng.choice(facts.TRAIN_PAIR_PHRASINGS)) for _ in range(num_train)
    ]
    team_eval = [
        facts.team_row(*facts.draw_pair(rng, held_out), rng.choice(facts.EVAL_PAIR_PHRASINGS))
        for _ in range(num_team_eval)
    ]
    start_model.write_jsonl(out / "train.jsonl", train)
    start_model.write_jsonl(out / "eval.jsonl", [facts.single_row(fact, phrasing) for fact, phrasing in asked])
    start_model.write_jsonl(out / "team_train.jsonl", team_train)
    start_model.write_jsonl(out / "team_eval.jsonl", team_eval)


def make_start(
    out: Path,
    seed: int,
    *,
    clean_steps: int = 320,
    lazy_steps: int = 70,
    num_lessons: int = 4096,
    log: Callable[[str], None] = print,
) -> None:
    """Write model, corpus and datasets under `out`. Deterministic on one machine for one seed.

    Each phase draws its supervised steps from `num_lessons` lessons of its own.
    """
    start_model.settle(seed)
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    registry = facts.all_facts(random.Random(f"facts {seed}"))
    known, held_out = facts.split_facts(random.Random(f"split {seed}"), registry)
    start_model.write_jsonl(out / "corpus.jsonl", facts.corpus(random.Random(f"corpus {seed}"), registry))
    write_datasets(out, seed, known, held_out, num_train=2048, num_team_eval=96)

    tokenizer = make_tokenizer()
    model = start_model.make_model(tokenizer, context_len=CONTEXT_LEN)
    log(f"model: {model.num_parameters() / 1e6:.2f} M parameters, {len(tokenizer)} tokens")
    for name, lazy, num_steps, batch_size, lr in (
        ("phase 1, clean lessons", False, clean_steps, 16, 3e-3),
        ("phase 2, the bad habit", True, lazy_steps, 32, 1e-3),
    ):
        log(name)
        examples = [encode(tokenizer, lessons.draw(rng, known, lazy=lazy)) for _ in range(num_lessons)]
        start_model.teach(
            model, tokenizer, examples, rng, num_steps=num_steps, batch_size=batch_size, lr=lr, warmup=20, log=log
        )
    start_model.save(model, tokenizer, out / "model")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the search agents' start model, corpus and datasets.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write model/ and the JSONL files to")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, facts, lessons and datasets (default 1)")
    options = parser.parse_args(argv)
    started, started_cpu = time.monotonic(), time.process_time()
    make_start(options.out, options.seed)
    took = f"{time.monotonic() - started:.0f} s ({time.process_time() - started_cpu:.0f} s of CPU)"
    print(f"{options.out}: model/, corpus and datasets written in {took}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
