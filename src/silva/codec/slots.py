"""Conversations with holes: everything that a user, a tool or a model wrote is cut out and kept beside the shape.

A *shape* is the tree that a chat template renders (dicts, lists, literals) in which each free text is a `Hole`. Equal
shapes give equal skeletons whatever the texts say, so a shape's `repr` is the key under which a skeleton is cached.

    messages   user: "hi"             assistant: "", calls get_time()
    shape      user: Hole(NEW, 0)     assistant: "", name "get_time", id Hole(NEW, 1)
    values     ["hi", "call_1"]       kinds ["user.content", "id"]

Blank texts stay literal, because templates branch on them; call ids and names are one hole per distinct value, because
templates compare them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from silva.types import JsonObject, Message, ToolCall, TransitionRefused

FRAME, CONTEXT, NEW = 0, 1, 2
"""Regions of holes: tools and template arguments; the small context around a delta; the messages to encode."""

IMAGE_WORD = "<image>"
"""The plain text that replaces an image where the chat template has no place for one."""
MAX_DEPTH = 64
_REGION_SIZE = 500_000
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_MARK = "Zq7x"
PLACEHOLDER = re.compile(_MARK + "([0-9a-z]{4})Z")
_PLAIN = re.compile(r"[\w .,:;/()'-]*")
_SAFE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_NINE = re.compile(r"[A-Za-z0-9]{9}")
_EDGES = re.compile(r"^\W+|\W+$")
_SCHEMA_KEYS = frozenset(
    {"type", "function", "name", "description", "parameters", "properties", "required", "items", "enum", "default"}
    | {"title", "format", "strict", "anyOf", "oneOf", "allOf", "not", "additionalProperties", "minimum", "maximum"}
    | {"minItems", "maxItems", "minLength", "maxLength", "pattern", "const", "nullable", "return", "examples", "$ref"}
    | {"$defs", "$schema", "$id", "definitions", "exclusiveMinimum", "exclusiveMaximum"}
)


@dataclass(frozen=True, slots=True)
class Hole:
    """One free text of a shape: number `index` of its region."""

    region: int
    """`FRAME`, `CONTEXT` or `NEW`."""
    index: int
    """The place of its text in the region's `Slots.values`."""

    def __repr__(self) -> str:
        return f"\x00{self.region}.{self.index}\x00"

    @property
    def placeholder(self) -> str:
        """Nine ASCII letters and digits: survives trimming and JSON, is a legal name, passes nine-character checks."""
        number, text = self.region * _REGION_SIZE + self.index, ""
        for _ in range(4):
            number, digit = divmod(number, 36)
            text = _DIGITS[digit] + text
        return f"{_MARK}{text}Z"


def hole_of(digits: str) -> Hole:
    """The hole whose placeholder contains these four digits."""
    return Hole(*divmod(int(digits, 36), _REGION_SIZE))


def materialise(tree: object, text_of: Callable[[Hole], str]) -> Any:
    """The tree with a text in each hole (in keys as well)."""
    if isinstance(tree, dict):
        pairs = cast("dict[str | Hole, object]", tree).items()
        return {text_of(key) if isinstance(key, Hole) else key: materialise(value, text_of) for key, value in pairs}
    if isinstance(tree, list):
        return [materialise(value, text_of) for value in cast("list[object]", tree)]
    return text_of(tree) if isinstance(tree, Hole) else tree


def owner(tree: Sequence[object], hole: Hole) -> str | None:
    """The path of the message that a hole belongs to."""
    mark = repr(hole)
    return next((f"messages[{i}]" for i, message in enumerate(tree) if mark in repr(message)), None)


def clean(text: str) -> str:
    """The text without lone surrogates, which no tokenizer can encode: each becomes U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@dataclass(slots=True)
class Slots:
    """The texts and kinds of the holes of one region, in order."""

    region: int
    """`FRAME`, `CONTEXT` or `NEW`."""
    values: list[str] = field(default_factory=list[str])
    """The text of each hole."""
    kinds: list[str] = field(default_factory=list[str])
    """What each text is: `user.content`, `name`, `id`, `argument`, `definition` and the like."""
    _shared: dict[tuple[str, str], Hole] = field(default_factory=dict[tuple[str, str], Hole])

    def new(self, value: str, kind: str) -> Hole:
        if len(self.values) >= _REGION_SIZE:
            raise TransitionRefused(f"one request contains more than {_REGION_SIZE} separate texts")
        self.values.append(value)
        self.kinds.append(kind)
        return Hole(self.region, len(self.values) - 1)

    def shared(self, value: str, kind: str) -> Hole:
        """One hole for all equal values of a kind."""
        key = (kind, value)
        hole = self._shared.get(key)
        if hole is None:
            hole = self._shared[key] = self.new(value, kind)
        return hole

    def share(self, value: str, kind: str, hole: Hole) -> None:
        """Let `value` mean a hole that exists already, also one of another region."""
        self._shared[kind, value] = hole

    def share_all(self, other: Slots) -> None:
        """Let every value that has one hole in `other` mean that hole here."""
        self._shared.update(other._shared)


@dataclass(frozen=True, slots=True)
class Words:
    """Decides which texts may stay in a rendered literal."""

    cores: frozenset[str]
    """The words inside the control tokens (`think` of `<think>`). They become holes, because a template that writes `<`
    before such a word and `>` behind it would make a control token out of harmless letters."""

    @classmethod
    def of(cls, control_tokens: Iterable[str]) -> Words:
        return cls(frozenset(core for token in control_tokens if (core := _EDGES.sub("", token)) and core != token))

    def plain(self, text: str) -> bool:
        """Only letters, digits and mild punctuation, no placeholder of ours, no core of a control token."""
        return (
            _PLAIN.fullmatch(text) is not None
            and len(text) < 200
            and _MARK not in text
            and _EDGES.sub("", text) not in self.cores
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CallStyle:
    """How a template wants an assistant turn with calls, found by rendering one."""

    arguments_as_text: bool = False
    """Whether the template takes arguments as a JSON string; else as a mapping."""
    takes_raw: bool = False
    """Whether the template prints arguments that are a string unchanged."""
    empty_content: str | None = None
    """The content of a turn without text; None leaves the field out."""
    nine_ids: bool = False
    """Whether the template accepts only call ids of nine letters or digits."""

    def calling_turn(self, call_id: str | Hole, name: str, argument: str | Hole) -> JsonObject:
        """An assistant turn without text that makes one call."""
        arguments = argument if self.arguments_as_text else {"a": argument}
        turn: JsonObject = {"role": "assistant", "tool_calls": [call_part(call_id, name, arguments)]}
        if self.empty_content is not None:
            turn["content"] = self.empty_content
        return turn


def safe_id(value: str, nine: bool) -> str:
    """The id as it is rendered: itself where it is harmless (and has nine characters, if needed), else a digest."""
    fits = _NINE if nine else _SAFE_ID
    if fits.fullmatch(value) and _MARK not in value:
        return value
    digest = hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()
    return digest[:9] if nine else f"call_{digest[:16]}"


def call_part(call_id: str | Hole, name: str | Hole, arguments: object) -> JsonObject:
    """One call of an assistant turn, as templates read it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_part(text: str | Hole) -> JsonObject:
    return {"type": "text", "text": text}


@dataclass(eq=False)
class ShapeBuilder:
    """Turns messages into shapes. The holes' texts gather in `slots`.

    `image_part` returns what the template takes for an image in a message of a role; None: it takes no image there.
    """

    slots: Slots
    """Where the texts go."""
    words: Words
    """The placeholders."""
    style: CallStyle
    """How calls are written."""
    image_part: Callable[[str], JsonObject | None] = lambda role: None
    """An image as the template takes it."""

    def message(self, message: Message) -> JsonObject:
        out: JsonObject = {"role": message.role}
        if message.role == "assistant":
            if message.reasoning:
                # two names, as transformers passes it: most templates read the first, harmony ones the second
                text = self._text(message.reasoning, "assistant.reasoning")
                out["reasoning_content"] = out["thinking"] = text
            if message.tool_calls:
                out["tool_calls"] = [self._call(call) for call in message.tool_calls]
            if message.content or not message.tool_calls:
                out["content"] = self._text(message.content, "assistant.content")
            elif self.style.empty_content is not None:
                out["content"] = self.style.empty_content
            return out
        kind = f"{message.role}.content"
        out["content"] = self._parts(message, kind) if message.parts else self._text(message.content, kind)
        if message.tool_call_id is not None:
            out["tool_call_id"] = self._id(message.tool_call_id)
        return out

    def _parts(self, message: Message, kind: str) -> list[JsonObject] | str | Hole:
        image = self.image_part(message.role)
        if image is None:
            return self._text("".join(part if isinstance(part, str) else IMAGE_WORD for part in message.parts), kind)
        return [
            text_part(self._text(part, f"{kind}.part")) if isinstance(part, str) else image for part in message.parts
        ]

    def _call(self, call: ToolCall) -> JsonObject:
        return call_part(self._id(call.id), self._name(call.name), self._arguments(call.arguments))

    def _id(self, value: str) -> Hole:
        return self.slots.shared(safe_id(value, self.style.nine_ids), "id")

    def _name(self, value: str) -> str | Hole:
        return value if value and self.words.plain(value) else self._shared_text(value, "name")

    def _text(self, value: str, kind: str) -> str | Hole:
        return self.slots.new(clean(value), kind) if value and not value.isspace() else value

    def _shared_text(self, value: str, kind: str) -> str | Hole:
        return self.slots.shared(clean(value), kind) if value and not value.isspace() else value

    def _arguments(self, raw: str) -> object:
        if not raw.strip():
            return "{}" if self.style.arguments_as_text else {}
        if self.style.arguments_as_text:
            return self.slots.new(clean(raw), "arguments")
        parsed = parse_arguments(raw)
        if parsed is not None:
            return self._walk(parsed)
        hole = self.slots.new(clean(raw), "arguments")
        return hole if self.style.takes_raw else {"arguments": hole}

    def _walk(self, value: object) -> object:
        if isinstance(value, dict):
            return {self._key(key): self._walk(item) for key, item in cast("JsonObject", value).items()}
        if isinstance(value, list):
            return [self._walk(item) for item in cast("list[object]", value)]
        return self._text(value, "argument") if isinstance(value, str) else value

    def _key(self, key: str) -> str | Hole:
        return key if self.words.plain(key) else self._shared_text(key, "argument_key")


def parse_arguments(raw: str) -> JsonObject | None:
    """The arguments of a call as a mapping, or None where the text is no JSON object (or one nested beyond use)."""
    try:
        value: object = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return cast("JsonObject", value) if _depth_ok(value, MAX_DEPTH) and isinstance(value, dict) else None


def _depth_ok(value: object, left: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    items = cast("JsonObject", value).values() if isinstance(value, dict) else cast("list[object]", value)
    return left > 0 and all(_depth_ok(item, left - 1) for item in items)


class DefinitionBuilder:
    """Turns tool definitions and template arguments into shapes: free strings become holes, odd keys are refused."""

    def __init__(self, slots: Slots, words: Words):
        self._slots = slots
        self._words = words

    def value(self, value: object, path: str, depth: int = 0) -> object:
        if depth > MAX_DEPTH:
            raise TransitionRefused(f"{path} is nested deeper than {MAX_DEPTH} levels", field=path)
        if isinstance(value, dict):
            pairs = cast("dict[object, object]", value).items()
            return {self._key(k, path): self.value(v, f"{path}.{k}", depth + 1) for k, v in pairs}
        if isinstance(value, list | tuple):
            items = cast("list[object]", value)
            return [self.value(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(items)]
        if isinstance(value, str):
            if self._words.plain(value) or value.isspace():
                return value
            return self._slots.shared(clean(value), "definition")
        if value is None or isinstance(value, bool | int | float):
            return value
        raise TransitionRefused(f"{path} is a {type(value).__name__}, which is not a JSON value", field=path)

    def _key(self, key: object, path: str) -> object:
        if isinstance(key, str) and key in _SCHEMA_KEYS:
            return key
        if not isinstance(key, str) or not _PLAIN.fullmatch(key) or _MARK in key:
            raise TransitionRefused(
                f"{path} has the key {key!r}; keys may contain only letters, digits, spaces and .,:;/()'-_, because a "
                "chat template may write them beside its own markers",
                field=path,
            )
        return key if self._words.plain(key) else self._slots.shared(key, "definition")
