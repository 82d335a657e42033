"""A small real tokenizer with a chat template of choice, made in a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oracles import NOW, small_bpe
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from silva.codec import TurnCodec

SPECIALS = ("<|end|>", "<|start|>", "<think>", "</think>", "<|eos|>")
TURNS = (
    "{%- for m in messages %}{{- '<|start|>' + m.role + '\\n' + (m.content or '') }}"
    "{%- for call in m.tool_calls or [] %}{{- '\\n' + call.function.name + ' ' + call.function.arguments | tojson }}"
    "{%- endfor %}{{- '<|end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}"
)


def tiny_tokenizer(template: str | None = TURNS, *, flags: dict[str, dict[str, Any]] | None = None) -> Any:
    """A byte-level BPE tokenizer of 350 tokens. `flags` are AddedToken arguments by special token."""
    backend = small_bpe()
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
