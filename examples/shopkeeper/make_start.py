"""Makes the shopkeeper's start: a small model that can use its tool but has got into the habit of not doing so.

    python3 examples/shopkeeper/make_start.py --out runs/shopkeeper/start --seed 1

writes `model/` (a Hugging Face folder: about 0.4 M Qwen3-shaped parameters and their own tokenizer), `train.jsonl` and
`eval.jsonl`. It takes less than a minute on one core, needs no network, and the same seed gives the same files.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Threads that spin while they wait cost more than they give on a small model; torch reads these when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import dialogues

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CONTEXT_LEN = 256

# A digit, a JSON key with its quotes and colon, a word with its blank, a run of signs with its blank, or a white space.
SPLIT_PATTERN = r"""\p{N}|[^\S\n]?\{?"\w+":|[^\S\n]?\p{L}+|[^\S\n]?[^\s\p{L}\p{N}]+|\s"""

CHAT_TEMPLATE = """\
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if has_system -%}{{- messages[0].content + '\\n' -}}{%- endif -%}
  {{- 'tools:' -}}
  {%- for tool in tools -%}
    {{- ' ' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' -}}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- elif has_system -%}
  {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\\n' + (message.content or '') -}}
    {%- for call in message.tool_calls or [] -%}
      {%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {%- if call.function.arguments is string -%}
        {{- call.function.arguments -}}
      {%- else -%}
        {{- call.function.arguments | tojson -}}
      {%- endif -%}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- elif not (message.role == 'system' and loop.first) -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def make_tokenizer(*, vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer taught on the task's own dialogues. Every digit is a token of its own."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CONTROL_TOKENS) - len(TAG_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_tokenizer_texts(), trainer)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    # Tags are no control tokens: they must survive decoding, because the tool call is read from the text.
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAG_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT_LEN,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _tokenizer_texts() -> list[str]:
    """The plain texts that stand between added tokens: every item in every known phrasing and in a call."""
    texts = ["system\ntools: lookup(item)", "user\n", "assistant\n", dialogues.GIVE_UP, dialogues.NO_SUCH_ITEM] * 100
    for item in dialogues.ITEMS:
        arguments = dialogues.call(item)["tool_calls"][0]["function"]["arguments"]
        texts += [f'\n{{"name": "lookup", "arguments": {arguments}}}\n'] * 20
        texts += [dialogues.question(item, phrasing)["content"] for phrasing in dialogues.TRAIN_PHRASINGS] * 4
    return texts


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Fresh Qwen3-shaped weights, about 0.4 million, tied embeddings, float32. Uses torch's global generator."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LEN,
        initializer_range=0.08,  # the usual 0.02 keeps so narrow a model from finding out how to copy for 400 steps
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        use_cache=True,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    return model


def encode_dialogue(
    tokenizer: PreTrainedTokenizerFast, messages: list[dialogues.Message]
) -> tuple[list[int], list[bool]]:
    """Token ids of a dialogue, and which of them the assistant has to produce (its text and its closing token)."""
    ids: list[int] = []
    learn: list[bool] = []
    so_far = ""
    for end, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        given = _render(tokenizer, messages[:end], add_generation_prompt=True)
        whole = _render(tokenizer, messages[: end + 1], add_generation_prompt=False).removesuffix("\n")
        for text, is_learned in ((given.removeprefix(so_far), False), (whole.removeprefix(given), True)):
            new = tokenizer.encode(text, add_special_tokens=False)
            ids += new
            learn += [is_learned] * len(new)
        so_far = whole
    return ids, learn


def _render(tokenizer: PreTrainedTokenizerFast, messages: list[dialogues.Message], **options: Any) -> str:
    return tokenizer.apply_chat_template(messages, tools=[dialogues.LOOKUP_TOOL], tokenize=False, **options)


def teach(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pool: list[list[dialogues.Message]],
    rng: random.Random,
    *,
    num_steps: int,
    batch_size: int,
    lr: float,
    warmup: int,
    log: Callable[[str], None],
) -> float:
    """Supervised steps on dialogues drawn from `pool`; returns the last step's loss (nats a learned token).

    The learning rate rises over `warmup` steps and then falls to a tenth along a cosine.
    """
    import torch

    examples = [encode_dialogue(tokenizer, messages) for messages in pool]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, betas=(0.9, 0.98), foreach=True)
    loss_value = math.nan
    for step in range(num_steps):
        progress = max(0.0, (step - warmup) / max(1, num_steps - warmup))
        scale = min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = lr * scale
        ids_BT, labels_BT = _batch(rng.sample(examples, batch_size), tokenizer.pad_token_id)
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss_value = loss.item()
        if (step + 1) % 100 == 0:
            log(f"  step {step + 1:4d} of {num_steps}  loss {loss_value:.3f}")
    return loss_value


def _batch(examples: list[tuple[list[int], list[bool]]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and labels (-100 where nothing is learned); causal attention never looks at the padding."""
    import torch

    width = max(len(ids) for ids, _ in examples)
    ids_BT = torch.full((len(examples), width), pad_id)
    labels_BT = torch.full((len(examples), width), -100)
    for row, (ids, learn) in enumerate(examples):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        labels_BT[row, : len(ids)] = torch.tensor([i if wanted else -100 for i, wanted in zip(ids, learn, strict=True)])
    return ids_BT, labels_BT


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
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (out / f"{name}.jsonl").write_text(text, encoding="utf-8")


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a Hugging Face folder, the chat template in tokenizer_config.json, where every reader looks for it."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that older transformers know, too
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


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
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    train_pairs, eval_pairs = dialogues.split_pairs(random.Random(f"pairs {seed}"))
    write_datasets(out, seed, train_pairs, eval_pairs, num_train=2048)

    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    log(f"model: {model.num_parameters() / 1e6:.2f} M parameters, {len(tokenizer)} tokens")
    for name, dialogue, num_steps, batch_size, lr in (
        ("phase 1, clean dialogues", dialogues.clean_dialogue, clean_steps, 16, 3e-3),
        ("phase 2, the bad habit", dialogues.lazy_dialogue, lazy_steps, 48, 1e-3),
    ):
        log(name)
        pool = [dialogue(rng, train_pairs) for _ in range(num_dialogues)]
        teach(model, tokenizer, pool, rng, num_steps=num_steps, batch_size=batch_size, lr=lr, warmup=20, log=log)
    save(model, tokenizer, out / "model")


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
