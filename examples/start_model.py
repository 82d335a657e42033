"""What the examples share in making a start model: tokenizer, chat template, Qwen3-shaped weights, supervised steps.

An example brings its dialogues and its tools; nothing in here knows a task. Needs no network.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Threads that spin while they wait cost more than they give on a small model; torch reads these when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

Message = dict[str, Any]
Encoded = tuple[list[int], list[bool]]
"""Token ids of a dialogue, and which of them the assistant has to produce."""

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

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


def make_tokenizer(texts: Iterable[str], *, vocab_size: int, context_len: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer taught on `texts`, the plain texts between added tokens. Every digit is one token."""
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
    core.train_from_iterator(texts, trainer)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    # Tags are no control tokens: they must survive decoding, because the tool call is read from the text.
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAG_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=context_len,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast, *, context_len: int) -> Qwen3ForCausalLM:
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
        max_position_embeddings=context_len,
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


def encode_dialogue(tokenizer: PreTrainedTokenizerFast, messages: list[Message], tools: list[Any]) -> Encoded:
    """A dialogue as tokens; learned are the assistant's texts, each with its closing token."""
    ids: list[int] = []
    learn: list[bool] = []
    so_far = ""
    for end, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        given = render(tokenizer, messages[:end], tools, add_generation_prompt=True)
        whole = render(tokenizer, messages[: end + 1], tools, add_generation_prompt=False).removesuffix("\n")
        for text, is_learned in ((given.removeprefix(so_far), False), (whole.removeprefix(given), True)):
            new = tokenizer.encode(text, add_special_tokens=False)
            ids += new
            learn += [is_learned] * len(new)
        so_far = whole
    return ids, learn


def render(tokenizer: PreTrainedTokenizerFast, messages: list[Message], tools: list[Any], **options: Any) -> str:
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)


def teach(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    examples: list[Encoded],
    rng: random.Random,
    *,
    num_steps: int,
    batch_size: int,
    lr: float,
    warmup: int,
    log: Callable[[str], None],
) -> float:
    """Supervised steps on batches drawn from `examples`; returns the last step's loss (nats a learned token).

    The learning rate rises over `warmup` steps and then falls to a tenth along a cosine.
    """
    import torch

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


def _batch(examples: list[Encoded], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and labels (-100 where nothing is learned); causal attention never looks at the padding."""
    import torch

    width = max(len(ids) for ids, _ in examples)
    ids_BT = torch.full((len(examples), width), pad_id)
    labels_BT = torch.full((len(examples), width), -100)
    for row, (ids, learn) in enumerate(examples):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        labels_BT[row, : len(ids)] = torch.tensor([i if wanted else -100 for i, wanted in zip(ids, learn, strict=True)])
    return ids_BT, labels_BT


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a Hugging Face folder, the chat template in tokenizer_config.json, where every reader looks for it."""
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that older transformers know, too
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_jsonl(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def settle(seed: int) -> None:
    """One thread, one seed, no progress bars: a start model is the same each time it is made on one machine."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
