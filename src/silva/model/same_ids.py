"""Checks that two model folders agree on token ids, as they must where one model scores what the other sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from silva.model.checkpoint import hf_config_dict, open_weight_files, read_json_object
from silva.types import ConfigError

JsonDoc = Mapping[str, Any]
"""A parsed `tokenizer.json`."""
_RULES = ("normalizer", "pre_tokenizer")


def check_same_ids(folder: Path, policy: Path, *, flag: str) -> None:
    """Raise ConfigError where the model in `folder` cannot score the tokens of the one in `policy`.

    It must be complete and have every id of the policy; its `tokenizer.json` must give each of these ids the same piece
    and split text by the same rules. Additional ids do no harm (rows of padding, further control tokens).
    """
    try:
        theirs, mine = num_ids(folder), num_ids(policy)
        for _ in open_weight_files(folder):
            pass
    except ConfigError as error:
        raise ConfigError(f"{flag} {folder} cannot be used: {error}") from error
    if theirs < mine:
        raise ConfigError(
            f"{flag} {folder}: its model has {theirs} ids, that of --hf-checkpoint {policy} {mine}: it could not score "
            "the others. Take a model with the same vocabulary"
        )
    found, own = folder / "tokenizer.json", policy / "tokenizer.json"
    if found.is_file() != own.is_file():
        has, lacks = (found, own) if found.is_file() else (own, found)
        raise ConfigError(
            f"{flag} {folder}: nothing shows that it reads the same ids as --hf-checkpoint {policy}: {has} is "
            f"there and {lacks} is not. Copy the tokenizer files of the model to it"
        )
    if found.is_file() and found.read_bytes() != own.read_bytes():
        difference = _difference(read_json_object(found), read_json_object(own))
        if difference is not None:
            raise ConfigError(
                f"{flag} {folder} has another tokenizer than --hf-checkpoint {policy}: {difference}. Take a model with "
                "the same tokenizer"
            )


def num_ids(folder: Path) -> int:
    """Rows of a model's vocabulary. Raises ConfigError where its config does not say."""
    value = _text_config(hf_config_dict(folder)).get("vocab_size")
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{folder / 'config.json'}: vocab_size is {value!r}; it must be a whole number above 0")
    return value


def num_positions(folder: Path) -> int | None:
    """Longest context that a model was made for; None where its config does not show it."""
    config = hf_config_dict(folder)
    value = _text_config(config).get("max_position_embeddings")
    return value if isinstance(value, int) and value > 0 else None


def plain_words(decode: Callable[[list[int]], str], vocab_size: int, most: int = 64) -> dict[int, str]:
    """Ids all over a vocabulary whose text is plain letters or digits, with that text: a probe of a tokenizer."""
    step = max(1, vocab_size // most)
    found: dict[int, str] = {}
    for first in range(0, vocab_size, step):
        for token in range(first, min(first + step, vocab_size)):
            text = decode([token])
            if text.isascii() and text.strip().isalnum():
                found[token] = text
                break
    return found


def _difference(theirs: JsonDoc, mine: JsonDoc) -> str | None:
    """The first thing in which two parsed `tokenizer.json` differ, of those that decide what ids mean."""
    their_pieces, my_pieces = _pieces(theirs), _pieces(mine)
    for token, piece in sorted(my_pieces.items()):
        if their_pieces.get(token) != piece:
            there = repr(their_pieces[token]) if token in their_pieces else "missing"
            return f"id {token} is {there} there and {piece!r} here"
    for name in ("type", "merges"):
        if _model_part(theirs, name) != _model_part(mine, name):
            return f"its model.{name} is another one"
    return next((f"its {name} is another one" for name in _RULES if theirs.get(name) != mine.get(name)), None)


def _pieces(tokenizer: JsonDoc) -> dict[int, str]:
    """The piece of each id, control tokens included."""
    vocab = _model_part(tokenizer, "vocab")
    if isinstance(vocab, dict):
        pieces = {int(token): str(piece) for piece, token in vocab.items()}
    else:
        pieces = {token: str(entry[0]) for token, entry in enumerate(vocab or [])}
    return pieces | {int(item["id"]): str(item["content"]) for item in tokenizer.get("added_tokens") or []}


def _model_part(tokenizer: JsonDoc, name: str) -> Any:
    model = tokenizer.get("model")
    value = model.get(name) if isinstance(model, dict) else None
    if name == "merges" and isinstance(value, list):  # written as "a b" or as ["a", "b"]
        return [merge if isinstance(merge, str) else " ".join(merge) for merge in value]
    return value


def _text_config(config: dict[str, object]) -> dict[str, object]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config
