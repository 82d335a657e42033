"""Reads the dump of a rollout step back, line by line. Errors name the file, line, field and value."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from silva.data import Prompt
from silva.store.dump_line import DumpLine, read_line
from silva.types import (
    LOGPROB_ROUNDING,
    LOWEST_LOGPROB,
    DatasetError,
    JsonObject,
    Mode,
    ResponseSpan,
    SessionInput,
    TrainingSample,
    VersionSpan,
    part_of,
)

_OF_GROUP = ("prompt_id", "dataset", "epoch", "row", "position", "attempt", "group_size", "prompt_state")
_OF_SESSION = ("group_id", "slot", "try_index", "status")
"""Fields that must agree between all lines of a group, and of a session."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedContext:
    """An exported context, without its credit, and the conversation in Chat form."""

    sample: TrainingSample
    messages: list[JsonObject]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedSession:
    """One agent run of a recorded group. Only an exported one has contexts."""

    session_id: str
    """As in the run."""
    slot: int
    """Its place in the group."""
    try_index: int
    """Sessions that the slot had before."""
    status: str
    """How it ended."""
    reason: str | None
    """Why; None where the status needs no reason."""
    error: str | None
    """The error in words."""
    contexts: list[RecordedContext] = field(default_factory=list[RecordedContext])
    """What it exported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedGroup:
    """One recorded try at a prompt."""

    group_id: str
    size: int
    """Slots."""
    prompt: Prompt
    mode: Mode
    attempt: int
    """Groups that the prompt had before."""
    start_step: int
    """Rollout step that started the group."""
    prompt_state: str
    """How the prompt ended."""
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
    for number, line in _lines(path):
        if line.mode != mode:
            continue
        seen.check(path, number, line)
        group = groups.setdefault(line.group_id, _group(line))
        session = group.sessions.setdefault(line.session_id, part_of(line, RecordedSession))
        if session.status == "exported":
            session.contexts.append(RecordedContext(sample=_sample(path, number, line), messages=line.messages))
    last: dict[str, RecordedGroup] = {}
    for group in sorted(groups.values(), key=lambda one: (one.prompt.position, one.attempt)):
        last[group.prompt.prompt_id] = group
    return list(last.values())


class _Seen:
    """The lines so far, by what they speak of: each place is filled once, and what belongs together agrees."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[int, DumpLine]] = {}
        self._places: dict[tuple[str, int, int], tuple[int, str]] = {}
        self._contexts: dict[tuple[str, str | None], int] = {}

    def check(self, path: Path, number: int, line: DumpLine) -> None:
        """Raise DatasetError where the line contradicts an earlier one."""
        for what, names in ((f"session {line.session_id}", _OF_SESSION), (f"group {line.group_id}", _OF_GROUP)):
            earlier, first = self._first.setdefault(what, (number, line))
            for name in names:
                if getattr(line, name) != getattr(first, name):
                    rule = f"in line {earlier}, of the same {what}, it is {getattr(first, name)!r}"
                    raise _wrong(path, number, line, name, rule)
        if line.slot >= line.group_size:
            raise _wrong(path, number, line, "slot", f"group_size is {line.group_size}")
        place = (line.group_id, line.slot, line.try_index)
        earlier, holder = self._places.setdefault(place, (number, line.session_id))
        if holder != line.session_id:
            rule = f"line {earlier} has {holder} as try {line.try_index} of slot {line.slot} of the group"
            raise _wrong(path, number, line, "session_id", rule)
        earlier = self._contexts.setdefault((line.session_id, line.name), number)
        if earlier != number:
            rule = f"this context of session {line.session_id} stands in line {earlier} already"
            raise _wrong(path, number, line, "name", rule)


def _wrong(path: Path, number: int, line: DumpLine, name: str, rule: str) -> DatasetError:
    return DatasetError(f"{path}, line {number}: {name} is {reprlib.repr(getattr(line, name))}; {rule}")


def _lines(path: Path) -> Iterator[tuple[int, DumpLine]]:
    """The lines of the file with their numbers, from 1."""
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield number, read_line(path, number, text)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}") from error


def _group(line: DumpLine) -> RecordedGroup:
    messages, metadata = line.input.get("messages"), line.input.get("metadata")
    if messages is None and metadata is None:
        metadata = {}
    prompt = part_of(line, Prompt, input=SessionInput(messages=messages, metadata=metadata))
    return part_of(line, RecordedGroup, size=line.group_size, prompt=prompt)


def _sample(path: Path, number: int, line: DumpLine) -> TrainingSample:
    for index, value in enumerate(line.logprobs):
        if not LOWEST_LOGPROB <= value <= LOGPROB_ROUNDING:
            raise DatasetError(
                f"{path}, line {number}: logprobs[{index}] is {value:g}; a log-prob lies between {LOWEST_LOGPROB:g} "
                "and 0"
            )
    try:
        json.dumps(line.metadata, allow_nan=False)
    except ValueError:
        raise _wrong(path, number, line, "metadata", "its numbers must be finite") from None
    if all(version < 0 for _, _, version in line.weight_spans):
        raise _wrong(path, number, line, "weight_spans", "none of them names the weights that sampled it")
    if any(line.loss_mask[: line.prompt_len]):
        raise _wrong(path, number, line, "prompt_len", "loss_mask is 1 before it, so the prompt is shorter")
    if line.node_id is None:
        raise _wrong(path, number, line, "node_id", "it must be a whole number from 0")
    try:
        return part_of(
            line,
            TrainingSample,
            version_spans=tuple(VersionSpan(start=a, length=n, version=v) for a, n, v in line.weight_spans),
            responses=tuple(ResponseSpan(node_id=node_id, start=a, length=n) for node_id, a, n in line.responses),
            images=tuple(line.images),
            credit=None,  # it is given anew
            response_credits=None,
        )
    except ValueError as error:
        raise DatasetError(f"{path}, line {number}: {error}") from error
