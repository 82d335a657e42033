"""A small real tokenizer with a chat template of choice, made in a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from silva.state.codec import TurnCodec

from .oracles import NOW

SPECIALS = ("<|end|>", "<|start|>", "<think>", "</think>", "<|eos|>")
TURNS = (
    "{%- for m in messages %}{{- '<|start|>' + m.role + '\\n' + (m.content or '') }}"
    "{%- for call in m.tool_calls or [] %}{{- '\\n' + call.function.name + ' ' + call.function.arguments | tojson }}"
    "{%- endfor %}{{- '<|end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}"
)
_CORPUS = ("the weather in Paris is fine today\n", "hello there, how are you?\n\n", "12 + 30 = 42  # answer\n") * 20


def tiny_tokenizer(template: str | None = TURNS, *, flags: dict[str, dict[str, Any]] | None = None) -> Any:
    """A byte-level BPE tokenizer of 350 tokens. `flags` are AddedToken arguments by special token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=350, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    options = flags or {}
    backend.add_special_tokens([AddedToken(t, normalized=False, **options.get(t, {})) for t in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>")
    tokenizer.chat_template = template
    return tokenizer


def tiny_codec(template: str = TURNS, *, flags: dict[str, dict[str, Any]] | None = None, **kwargs: Any) -> TurnCodec:
    return TurnCodec(tiny_tokenizer(template, flags=flags), now=NOW, **kwargs)


def tiny_folder(path: Path, template: str | None = TURNS, **files: Any) -> Path:
    """A checkpoint folder without weights; `files` are JSON files by name."""
    tiny_tokenizer(template).save_pretrained(str(path))
    for name, content in files.items():
        (path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path
