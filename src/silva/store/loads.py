"""Reads the dump of a rollout step back, line by line. Whatever is wrong names the file, line, field and value."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from silva.data.prompts import Prompt
from silva.types.errors import DatasetError
from silva.types.generation import LOGPROB_ROUNDING, LOWEST_LOGPROB, VersionSpan
from silva.types.messages import JsonObject
from silva.types.rollout import Mode, PromptState, ResponseSpan, SessionInput, SessionStatus, TrainingSample
from silva.types.strict_json import read_json

_OF_GROUP = ("prompt_id", "dataset", "epoch", "row", "position", "attempt", "group_size", "prompt_state")
_OF_SESSION = ("group_id", "slot", "try_index", "status")
"""What all lines of a group, and of a session, have in common."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedContext:
    """An exported context, without its credit, and the conversation in Chat form."""

    sample: TrainingSample
    messages: list[JsonObject]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedSession:
    """One agent run of a recorded group. Only an exported one has contexts."""

    session_id: str
    slot: int
    try_index: int
    status: str
    reason: str | None
    error: str | None
    contexts: list[RecordedContext] = field(default_factory=list[RecordedContext])


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedGroup:
    """One recorded try at a prompt, of `size` slots, and what became of the prompt in the end."""

    group_id: str
    size: int
    prompt: Prompt
    mode: Mode
    attempt: int
    prompt_state: str
    prompt_reason: str | None
    sessions: dict[str, RecordedSession] = field(default_factory=dict[str, RecordedSession])

    def slots(self) -> list[RecordedSession]:
        """The last session of each slot: the exported one, or the failure that was its last try."""
        last: dict[int, RecordedSession] = {}
        for session in sorted(self.sessions.values(), key=lambda one: (one.slot, one.try_index)):
            last[session.slot] = session
        return list(last.values())


def read_rollout_dump(path: Path, *, mode: Mode = "train") -> list[RecordedGroup]:
    """The groups of one mode, in the order in which their prompts were issued; of each prompt the last try alone.

    Raises DatasetError for a file that cannot be read, for the first line that is not as `write_rollout_dump` writes it
    and for the first that contradicts an earlier one.
    """
    groups: dict[str, RecordedGroup] = {}
    seen = _Seen()
    for line in _lines(path):
        if line.text("mode") != mode:
            continue
        seen.check(line)
        group = groups.setdefault(line.text("group_id"), _group(line, mode))
        session_id = line.text("session_id")
        session = group.sessions.setdefault(session_id, _session(line, session_id))
        if session.status == "exported":
            session.contexts.append(RecordedContext(sample=_sample(line), messages=line.objects("messages")))
    last: dict[str, RecordedGroup] = {}
    for group in sorted(groups.values(), key=lambda one: (one.prompt.position, one.attempt)):
        last[group.prompt.prompt_id] = group
    return list(last.values())


class _Line:
    """One JSON object, whose fields are read with their type checked."""

    def __init__(self, path: Path, number: int, document: JsonObject):
        self.number = number
        self.where = f"{path}, line {number}"
        self._document = document

    def wrong(self, name: str, rule: str) -> DatasetError:
        return DatasetError(f"{self.where}: {name} is {reprlib.repr(self._document.get(name))}; {rule}")

    def any(self, name: str) -> Any:
        if name not in self._document:
            raise DatasetError(
                f"{self.where}: it has no {name!r}; a dump of this version of Silva is needed "
                "(--save-debug-rollout-data)"
            )
        return self._document[name]

    def text(self, name: str) -> str:
        return self._typed(name, _is_text, "it must be a text")

    def text_or_none(self, name: str) -> str | None:
        return self._typed(name, lambda value: value is None or _is_text(value), "it must be a text or null")

    def whole(self, name: str) -> int:
        return self._typed(name, _is_whole, "it must be a whole number from 0")

    def flag(self, name: str) -> bool:
        return self._typed(name, lambda value: isinstance(value, bool), "it must be true or false")

    def number_or_none(self, name: str) -> float | None:
        return self._typed(name, lambda value: value is None or _is_number(value), "it must be a number or null")

    def object(self, name: str) -> JsonObject:
        return self._typed(name, lambda value: isinstance(value, dict), "it must be an object")

    def numbers_by_name(self, name: str) -> dict[str, float]:
        values = self.object(name)
        if not all(map(_is_number, values.values())):
            raise self.wrong(name, "its values must be numbers")
        return values

    def texts(self, name: str) -> list[str]:
        return self._each(name, _is_text, "a text")

    def objects(self, name: str) -> list[JsonObject]:
        return self._each(name, lambda value: isinstance(value, dict), "an object")

    def wholes(self, name: str) -> list[int]:
        return self._each(name, _is_whole, "a whole number from 0")

    def bits(self, name: str) -> list[int]:
        return self._each(name, lambda value: _is_whole(value) and value < 2, "0 or 1")

    def numbers(self, name: str) -> list[float]:
        return self._each(name, _is_number, "a finite number")

    def triples(self, name: str) -> list[tuple[int, int, int]]:
        def fits(value: Any) -> bool:
            return isinstance(value, list) and len(value) == 3 and all(map(_is_int, value))

        return [(a, b, c) for a, b, c in self._each(name, fits, "a list of three whole numbers")]

    def _typed(self, name: str, fits: Callable[[Any], bool], rule: str) -> Any:
        value = self.any(name)
        if not fits(value):
            raise self.wrong(name, rule)
        return value

    def _each(self, name: str, fits: Callable[[Any], bool], what: str) -> list[Any]:
        values = self._typed(name, lambda value: isinstance(value, list), "it must be a list")
        for index, value in enumerate(values):
            if not fits(value):
                raise DatasetError(f"{self.where}: {name}[{index}] is {reprlib.repr(value)}; it must be {what}")
        return values


class _Seen:
    """The lines so far, by what they speak of: each place is filled once, and what belongs together agrees."""

    def __init__(self) -> None:
        self._fields: dict[str, tuple[int, list[Any]]] = {}
        self._places: dict[tuple[str, int, int], tuple[int, str]] = {}
        self._contexts: dict[tuple[str, str | None], int] = {}

    def check(self, line: _Line) -> None:
        """Raise DatasetError where the line contradicts an earlier one."""
        group, session = line.text("group_id"), line.text("session_id")
        self._agrees(line, f"session {session}", _OF_SESSION)
        self._agrees(line, f"group {group}", _OF_GROUP)
        size, slot, try_index = line.whole("group_size"), line.whole("slot"), line.whole("try_index")
        if slot >= size:
            raise line.wrong("slot", f"group_size is {size}")
        number, holder = self._places.setdefault((group, slot, try_index), (line.number, session))
        if holder != session:
            raise line.wrong("session_id", f"line {number} has {holder} as try {try_index} of slot {slot} of the group")
        number = self._contexts.setdefault((session, line.text_or_none("name")), line.number)
        if number != line.number:
            raise line.wrong("name", f"this context of session {session} stands in line {number} already")

    def _agrees(self, line: _Line, what: str, names: tuple[str, ...]) -> None:
        found = [line.any(name) for name in names]
        number, first = self._fields.setdefault(what, (line.number, found))
        for name, value, expected in zip(names, found, first, strict=True):
            if value != expected:
                raise line.wrong(name, f"in line {number}, of the same {what}, it is {expected!r}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return _is_int(value) and abs(value) < 1 << 1000


def _word(line: _Line, name: str, words: tuple[str, ...]) -> str:
    word = line.text(name)
    if word not in words:
        raise line.wrong(name, f"it must be one of {', '.join(words)}")
    return word


def _logprobs(line: _Line) -> list[float]:
    values = line.numbers("logprobs")
    for index, value in enumerate(values):
        if not LOWEST_LOGPROB <= value <= LOGPROB_ROUNDING:
            raise DatasetError(
                f"{line.where}: logprobs[{index}] is {value:g}; a log-prob lies between {LOWEST_LOGPROB:g} and 0"
            )
    return values


def _metadata(line: _Line) -> JsonObject:
    value = line.object("metadata")
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise line.wrong("metadata", "its numbers must be finite") from None
    return value


def _lines(path: Path) -> Iterator[_Line]:
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield _Line(path, number, _document(path, number, text))
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}") from error


def _document(path: Path, number: int, text: bytes) -> JsonObject:
    try:
        document = read_json(text, constants=True)
    except ValueError as error:
        raise DatasetError(f"{path}, line {number}: not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise DatasetError(f"{path}, line {number}: it must be a JSON object, this is {type(document).__name__}")
    return document


def _group(line: _Line, mode: Mode) -> RecordedGroup:
    row = line.object("input")
    messages, metadata = row.get("messages"), row.get("metadata")
    if messages is None and metadata is None:
        metadata = {}
    return RecordedGroup(
        group_id=line.text("group_id"),
        size=line.whole("group_size"),
        prompt=Prompt(
            prompt_id=line.text("prompt_id"),
            dataset=line.text("dataset"),
            epoch=line.whole("epoch"),
            row=line.whole("row"),
            position=line.whole("position"),
            input=SessionInput(messages=messages, metadata=metadata),
            label=line.any("label"),
        ),
        mode=mode,
        attempt=line.whole("attempt"),
        prompt_state=_word(line, "prompt_state", get_args(PromptState)),
        prompt_reason=line.text_or_none("prompt_reason"),
    )


def _session(line: _Line, session_id: str) -> RecordedSession:
    return RecordedSession(
        session_id=session_id,
        slot=line.whole("slot"),
        try_index=line.whole("try_index"),
        status=_word(line, "status", get_args(SessionStatus)),
        reason=line.text_or_none("reason"),
        error=line.text_or_none("error"),
    )


def _sample(line: _Line) -> TrainingSample:
    fields: dict[str, Any] = {
        "session_id": line.text("session_id"),
        "group_id": line.text("group_id"),
        "name": line.text_or_none("name"),
        "node_id": line.whole("node_id"),
        "prompt_len": line.whole("prompt_len"),
        "token_ids": line.wholes("token_ids"),
        "loss_mask": line.bits("loss_mask"),
        "logprobs": _logprobs(line),
        "kept_mass": line.numbers("kept_mass"),
        "reward": line.number_or_none("reward"),
        "helpers": line.numbers_by_name("helpers"),
        "truncated": line.flag("truncated"),
        "metadata": _metadata(line),
        "images": tuple(line.texts("images")),
    }
    spans, responses = line.triples("weight_spans"), line.triples("responses")
    if all(version < 0 for _, _, version in spans):
        raise line.wrong("weight_spans", "none of them names the weights that sampled it")
    if any(fields["loss_mask"][: fields["prompt_len"]]):
        raise line.wrong("prompt_len", "loss_mask is 1 before it, so the prompt is shorter")
    try:
        return TrainingSample(
            version_spans=tuple(VersionSpan(start=a, length=n, version=v) for a, n, v in spans),
            responses=tuple(ResponseSpan(node_id=node_id, start=a, length=n) for node_id, a, n in responses),
            **fields,
        )
    except ValueError as error:
        raise DatasetError(f"{line.where}: {error}") from error
