"""One line of a dump: what the writer writes and the reader checks, field by field, in the order of the file.

    {"rollout_id": 4, ..., "group_id": "...", "slot": 0, ..., "name": "main", "token_ids": [9, 4, ...], ...}

A line is one exported context. A session that exported none has one line as well: its context fields are empty.
"""

from __future__ import annotations

import math
import re
import reprlib
from pathlib import Path
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from silva.store.encode import to_json
from silva.types import DatasetError, JsonObject, Mode, PromptState, SessionStatus, read_json

Whole = Annotated[int, msgspec.Meta(ge=0, description="a whole number from 0")]
Bit = Annotated[int, msgspec.Meta(ge=0, le=1, description="0 or 1")]
Finite = Annotated[float, msgspec.Meta(description="a finite number")]
Triple = Annotated[tuple[int, int, int], msgspec.Meta(description="a list of three whole numbers")]


class DumpRequest(msgspec.Struct, kw_only=True, frozen=True):
    """One model request of the session. Times are seconds since the session started."""

    request_id: str
    node_id: int | None
    """The response that it got, as a node of the session; None where it got none."""
    http_status: int | None
    error_code: str | None
    finish_reason: str | None
    arrived_s: float
    wait_s: float
    """Time that the request waited for the session's lease."""
    latency_s: float | None
    """None where it was never answered."""


class DumpLine(msgspec.Struct, kw_only=True, frozen=True):
    """Where a context belongs, what became of its session, and the context itself, token by token."""

    rollout_id: Whole
    """The step of the file: the group's `train_step`, or its `start_step` while there is none."""
    start_step: Whole = 0
    """The rollout step that started the group."""
    train_step: int | None = None
    """The step that trained the group or gave it up."""
    prompt_id: str
    dataset: str
    epoch: Whole
    row: Whole
    """The row of the dataset file, from 0."""
    position: Whole
    """The prompt's place in the order of issue, from 0."""
    prompt_state: PromptState
    prompt_reason: str | None
    group_id: str
    attempt: Whole
    """How many groups the prompt had before this one."""
    group_size: Whole
    """Slots of the group."""
    session_id: str
    slot: Whole
    try_index: Whole
    """How many sessions the slot had before this one."""
    mode: Mode
    status: SessionStatus
    reason: str | None
    error: str | None
    session_reward: float | None
    session_metadata: JsonObject
    started_s: float
    """Wall seconds since the epoch, as `ended_s`."""
    ended_s: float | None
    label: object = None
    """The row's value under --label-key, any JSON value."""
    input: JsonObject = {}
    """Messages and metadata as the agent got them."""
    output: str | None = None
    """What the agent wrote as its result; None where it wrote nothing, or too much to be repeated here."""
    output_len: int | None = None
    """Bytes that the agent wrote."""
    session_turns: Whole = 0
    """Responses committed in the session, in this context or not."""
    num_aborts: Whole = 0
    """Engine attempts of the session that were aborted."""
    min_weight_version: int | None = None
    max_weight_version: int | None = None
    requests: list[DumpRequest] = []
    name: str | None = None
    """The context's name; None where the agent named none."""
    node_id: int | None = None
    """The state that the context ends in; None where the session exported nothing."""
    state_key: str | None = None
    messages: list[JsonObject] = []
    """The conversation in Chat form."""
    tools: list[JsonObject] = []
    chat_template_kwargs: JsonObject = {}
    num_turns: Whole = 0
    truncated: bool = False
    """The last answer was cut by a length limit."""
    reward: float | None = None
    helpers: dict[str, float] = {}
    """The other numbers of the reward object."""
    credit: float | None = None
    response_credits: list[float] | None = None
    """One for each of `responses`; None where all have `credit`."""
    metadata: JsonObject = {}
    """What the agent wrote for this context."""
    prompt_len: Whole = 0
    """Tokens before the first sampled one."""
    token_ids: list[Whole] = []
    """Prompt and response in one piece, [T]."""
    loss_mask: list[Bit] = []
    """1 where the model sampled the token and it is trained, [T]."""
    logprobs: list[Finite] = []
    """Log-probs of the sampled ids, 0.0 elsewhere, [T]."""
    kept_mass: list[Finite] = []
    """Probability that top-p and top-k left in play, 1.0 elsewhere, [T]."""
    weight_spans: list[Triple] = []
    """(start, length, weight version) over the T tokens; version -1 was not sampled."""
    responses: list[Triple] = []
    """(node, start, length) of each turn's sampled ids."""
    images: list[str] = []

    def encode(self) -> bytes:
        """The line as the file has it, its line break included."""
        document = msgspec.structs.asdict(self)
        document["requests"] = [msgspec.structs.asdict(request) for request in self.requests]
        return to_json(document).encode() + b"\n"


_LATER = frozenset({"start_step", "train_step"})
"""Fields that dumps of earlier versions lack."""
_FINITE = ("logprobs", "kept_mass")


def read_line(path: Path, number: int, text: bytes) -> DumpLine:
    """Line `number` of a dump. Raises DatasetError that names file, line, field and value."""
    where = f"{path}, line {number}"
    try:
        document = read_json(text, constants=True)
    except ValueError as error:
        raise DatasetError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise DatasetError(f"{where}: it must be a JSON object, this is {type(document).__name__}")
    missing = next((name for name in DumpLine.__struct_fields__ if name not in document and name not in _LATER), None)
    if missing is not None:
        needed = "a dump of this version of Silva is needed (--save-debug-rollout-data)"
        raise DatasetError(f"{where}: it has no {missing!r}; {needed}")
    document.setdefault("start_step", document["rollout_id"])
    try:
        line = msgspec.convert(document, DumpLine)
    except msgspec.ValidationError as error:
        raise DatasetError(f"{where}: {_sentence(document, str(error))}") from error
    for name in _FINITE:
        for index, value in enumerate(getattr(line, name)):
            if not math.isfinite(value):
                raise DatasetError(f"{where}: {name}[{index}] is {value}; it must be a finite number")
    return line


def _sentence(document: JsonObject, fault: str) -> str:
    """msgspec's complaint in the words of this file."""
    found = re.search(r"at `\$\.(\w+)(?:\[(\d+|\.\.\.)\])?", fault)
    if found is None:
        return fault
    name, index = found[1], found[2]
    rule = _HINTS[name]
    if index == "...":
        return f"{name} is {reprlib.repr(document[name])}; its values must be numbers"
    if index is None:
        return f"{name} is {reprlib.repr(document[name])}; it must be {_rule(rule)}"
    (item,) = get_args(_without_none(rule))
    return f"{name}[{index}] is {reprlib.repr(document[name][int(index)])}; it must be {_rule(item)}"


_HINTS = get_type_hints(DumpLine, include_extras=True)
_WORDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a number", dict: "an object"}


def _rule(hint: object) -> str:
    """What a value of this type must be, in words."""
    if get_origin(hint) is Annotated:
        return str(get_args(hint)[1].description)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    if _is_union(hint):
        return f"{_rule(_without_none(hint))} or null"
    origin = get_origin(hint) or hint
    return "a list" if origin is list else next((word for kind, word in _WORDS.items() if kind is origin), "an object")


def _without_none(hint: object) -> object:
    return next(arm for arm in get_args(hint) if arm is not type(None)) if _is_union(hint) else hint


def _is_union(hint: object) -> bool:
    return get_origin(hint) in (Union, UnionType)
