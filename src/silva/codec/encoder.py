"""Text to ids, with control tokens only where a template (or a model) wrote them.

A tokenizer turns every added token that it meets in a text into its id, also in text that a user or a tool wrote. So
text is encoded here by a *copy* of the tokenizer that knows no added token. Added tokens are looked for in template
literals only, and all text between two of them is joined to one string before it is encoded: pieces encoded one by one
would give other ids than the whole, and blanks, Unicode composition and word rules reach across the seams.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from tokenizers import Tokenizer

from silva.codec.slots import Hole
from silva.codec.transforms import TextSlot, fill
from silva.types import ConfigError, JsonObject, TransitionRefused

_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # White_Space, as the Rust tokenizers see it
_LEADING = re.compile(f"^[{_SPACE}]+")
_TRAILING = re.compile(f"[{_SPACE}]+$")

Part = str | TextSlot
Trie = dict[str, "Trie"]
"""Texts by their letters; the key "" marks where one ends."""


@dataclass(frozen=True, slots=True)
class ControlToken:
    """An added token of the tokenizer."""

    id: int
    """Its token id."""
    text: str
    """Its spelling."""
    eats_left: bool
    """Whether the tokenizer drops blanks before it (lstrip)."""
    eats_right: bool
    """Whether the tokenizer drops blanks behind it (rstrip)."""
    unclear: str = ""
    """Why a plain search does not find it as the tokenizer does; empty where a plain search is right."""


@dataclass(frozen=True, slots=True)
class TextSegment:
    """The text between two control tokens, in parts that are joined before they are encoded."""

    parts: tuple[Part, ...]
    """Literals and slots, in order."""
    after_eater: bool
    """Whether the token before it drops blanks behind itself."""
    before_eater: bool
    """Whether the token behind it drops blanks before itself."""
    first: bool
    """Whether it starts the whole sequence."""


Program = tuple["list[int] | TextSegment", ...]


class TokenText:
    """The tokenizer as the codec needs it. Thread-safe: nothing changes after it was made."""

    def __init__(self, backend: Tokenizer):
        self.full = backend
        state: JsonObject = json.loads(backend.to_str())
        self.control = _control_tokens(backend, state)
        self.by_id = {token.id: token for token in self.control.values()}
        self._find = re.compile(_trie_pattern(self.control)) if self.control else re.compile(r"(?!)")
        self._first = _without_control(state, self.control)
        inner = _inner_copy(state, self.control)
        self.inner_differs = inner is not None
        self._inner = inner or self._first
        # One text as a batch is quicker: it keeps no places of letters. With parallel batches it would wake threads.
        self._as_batch = os.environ.get("TOKENIZERS_PARALLELISM") == "false"
        self._blank_ids = _renumbered(state, self.control, self._first)
        self._check_no_leak()

    def inert(self, text: str) -> str:
        """The text with a harmless letter in place of each control token's text."""
        return self._find.sub("x", text)

    def split(self, text: str) -> list[str | ControlToken]:
        """A template literal as text and control tokens."""
        out: list[str | ControlToken] = []
        at = 0
        for match in self._find.finditer(text):
            token = self.control[match.group()]
            if token.unclear:
                raise TransitionRefused(f"the chat template writes {token.text!r}, {token.unclear}")
            if match.start() > at:
                out.append(text[at : match.start()])
            out.append(token)
            at = match.end()
        if at < len(text):
            out.append(text[at:])
        return out

    def compile(self, items: Iterable[Part | ControlToken], *, first: bool) -> Program:
        """A program that gives ids once the slots have texts. `first`: the items start the whole sequence."""
        ops: list[list[int] | TextSegment] = []
        parts: list[Part] = []
        before: ControlToken | None = None
        for item in [*items, None]:
            if isinstance(item, str | TextSlot):
                parts.append(item)
                continue
            if parts:
                segment = TextSegment(
                    parts=tuple(parts),
                    after_eater=before is not None and before.eats_right,
                    before_eater=item is not None and item.eats_left,
                    first=first and before is None,
                )
                parts = []
                static = all(isinstance(part, str) for part in segment.parts)
                _add(ops, self._segment(segment, _no_text) if static else segment)
            if item is not None:
                _add(ops, [item.id])
                before = item
        return tuple(ops)

    def run(self, program: Program, text_of: Callable[[Hole], str]) -> list[int]:
        ids: list[int] = []
        for op in program:
            ids.extend(op if isinstance(op, list) else self._segment(op, text_of))
        return ids

    def _segment(self, segment: TextSegment, text_of: Callable[[Hole], str]) -> list[int]:
        text = fill(segment.parts, text_of)
        if segment.after_eater:
            text = _LEADING.sub("", text)
        if segment.before_eater:
            text = _TRAILING.sub("", text)
        if not text:
            return []
        return self._plain(self._first if segment.first else self._inner, text)

    def _plain(self, copy: Tokenizer, text: str) -> list[int]:
        if self._as_batch:
            ids = copy.encode_batch_fast([text], add_special_tokens=False)[0].ids
        else:
            ids = copy.encode(text, add_special_tokens=False).ids
        return [self._blank_ids.get(i, i) for i in ids] if self._blank_ids else ids

    def encode(self, text: str, *, first: bool = False) -> list[int]:
        """A text in which control tokens count as such: what a model sampled, or a template wrote."""
        return self.run(self.compile(self.split(text), first=first), _no_text)

    def encode_plain(self, text: str) -> list[int]:
        """A text in which nothing is a control token."""
        return self._plain(self._inner, text)

    def _check_no_leak(self) -> None:
        for token in self.control.values():
            text = token.text
            for probe in (text, f" {text}", text + text, f"x{text}x", f"\n{text}\n"):
                leaked = [i for i in self.encode_plain(probe) if i in self.by_id]
                if leaked:
                    raise ConfigError(
                        f"the tokenizer gives the control token {self.by_id[leaked[0]].text!r} for plain text "
                        f"{probe!r} even without its added tokens, so text from users could forge turns; use a "
                        "tokenizer whose model (BPE) does not reach its special tokens"
                    )


def _no_text(hole: Hole) -> str:
    return ""


def _add(ops: list[list[int] | TextSegment], op: list[int] | TextSegment) -> None:
    if isinstance(op, list) and ops and isinstance(ops[-1], list):
        ops[-1] = ops[-1] + op
    else:
        ops.append(op)


def _control_tokens(backend: Tokenizer, state: JsonObject) -> dict[str, ControlToken]:
    """All added tokens but those made of blanks: these are plain text that some vocabularies keep in the added list."""
    normalizer = backend.normalizer
    found: dict[str, ControlToken] = {}
    for entry in state["added_tokens"]:
        text = str(entry["content"])
        if not text or not text.replace("▁", " ").strip():
            continue
        unclear = ""
        if entry["single_word"]:
            unclear = "which its tokenizer takes for a token only where no letter is beside it"
        elif entry["normalized"] and normalizer is not None and normalizer.normalize_str(text) != text:
            unclear = "which its tokenizer looks for in normalised text only"
        found[text] = ControlToken(
            id=int(entry["id"]),
            text=text,
            eats_left=bool(entry["lstrip"]),
            eats_right=bool(entry["rstrip"]),
            unclear=unclear,
        )
    return found


def _without_control(state: JsonObject, control: dict[str, ControlToken]) -> Tokenizer:
    stripped = dict(state)
    stripped["added_tokens"] = [entry for entry in state["added_tokens"] if entry["content"] not in control]
    stripped.update(post_processor=None, truncation=None, padding=None)
    return Tokenizer.from_str(json.dumps(stripped))


def _renumbered(state: JsonObject, control: dict[str, ControlToken], copy: Tokenizer) -> dict[int, int]:
    """Ids of the copy's remaining added tokens, which the copy renumbers, to their ids in the full tokenizer."""
    kept = {
        str(entry["content"]): int(entry["id"]) for entry in state["added_tokens"] if entry["content"] not in control
    }
    found = {copy.token_to_id(text): token_id for text, token_id in kept.items()}
    return {copied: token_id for copied, token_id in found.items() if copied is not None and copied != token_id}


def _inner_copy(state: JsonObject, control: dict[str, ControlToken]) -> Tokenizer | None:
    """A copy for text that does not start the sequence, where the tokenizer marks only the first word with a blank."""
    if '"first"' not in json.dumps(state.get("pre_tokenizer")):
        return None
    return _without_control({**state, "pre_tokenizer": _never_first(state["pre_tokenizer"])}, control)


def _never_first(node: object) -> object:
    if isinstance(node, dict):
        out = {key: _never_first(value) for key, value in cast("dict[str, object]", node).items()}
        if out.get("prepend_scheme") == "first":
            out["prepend_scheme"] = "never"
        return out
    return [_never_first(item) for item in cast("list[object]", node)] if isinstance(node, list) else node


def _trie_pattern(texts: Iterable[str]) -> str:
    """A pattern that finds the leftmost, longest of many texts without trying each at every place."""
    root: Trie = {}
    for text in texts:
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _trie_node(root)


def _trie_node(node: Trie) -> str:
    tail = ""
    while len(node) == 1 and "" not in node:
        (char, node), *_ = node.items()
        tail += re.escape(char)
    optional = "" in node
    branches = [re.escape(char) + _trie_node(child) for char, child in sorted(node.items()) if char]
    if not branches:
        return tail
    return f"{tail}(?:{'|'.join(branches)}){'?' if optional else ''}"


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """How many items two sequences share at their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
