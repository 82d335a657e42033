"""What an agent may write as its output: one object for its whole session, or a record for each context it names.

A document with `messages` is a record of explicit export; several are written one per line (JSON Lines). A document
without them describes the session's only context. Every fault is a `SessionFailure` that names the line and the field.

    {"reward": 1.0}                                            one context, its reward
    {"name": "main", "messages": [...], "reward": 1.0}         a named context; more may follow, one per line
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NoReturn

from silva.types import MAX_SHOWN, SURROGATE, JsonFault, JsonObject, SessionFailure, read_json_at, safe_text, shown
from silva.wire.json_in import RawObject, read_body

RECORD_INVALID = "record_invalid"
"""The ledger's word for a session whose output names a context in a form that cannot be read."""
MAX_NAME_CHARS = 256
MAX_RECORDS = 10_000
HISTORY_KEYS = ("messages", "tools", "chat_template_kwargs")
_MAX_DEPTH = 64
_HALF = "holds half of a surrogate pair"
_BLANK = " \t\r\n"
_REST_BLANK = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputRecord:
    """One named context."""

    name: str
    """Unique in the document."""
    line: int
    """Line of the file where it begins, from 1."""
    fields: RawObject
    """`messages`, `tools` and `chat_template_kwargs` as they were written."""
    reward: object = None
    """Whatever JSON was written; None where it is missing or null."""
    metadata: JsonObject = field(default_factory=dict)
    """Whatever the agent adds; fit for the ledger."""
    ignored: tuple[str, ...] = ()
    """Keys without a meaning."""

    @property
    def where(self) -> str:
        return _where(self.name, self.line)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputDocument:
    """What an agent wrote."""

    reward: object = None
    """Whatever JSON was written; None where it is missing or null."""
    metadata: JsonObject = field(default_factory=dict)
    """Whatever the agent adds; fit for the ledger."""
    ignored: tuple[str, ...] = ()
    """Keys without a meaning."""
    records: tuple[OutputRecord, ...] = ()
    """The named contexts of an explicit export; the other fields are empty then."""


def parse_output(data: bytes) -> OutputDocument:
    """Read an output document; a blank one is empty. Rewards are not checked yet.

    Raises SessionFailure: `output_invalid` (not readable, no JSON, neither one object nor records), `record_invalid` (a
    record without a name of its own, or without a list of messages), `metadata_invalid`.
    """
    if data.startswith(b"\xef\xbb\xbf"):
        output_invalid("it starts with a byte order mark; write plain UTF-8")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        output_invalid(f"byte {error.start} (line {line}) is not UTF-8: {data[error.start : error.start + 8]!r}")
    if not text.strip(_BLANK):
        return OutputDocument()
    values = list(islice(_values(text), MAX_RECORDS + 1))
    if len(values) > MAX_RECORDS:
        output_invalid(f"it holds more than {MAX_RECORDS} JSON values; a session has at most that many contexts")
    if any(isinstance(value.value, dict) and "messages" in value.value for value in values):
        return OutputDocument(records=tuple(_records(values)))
    return _document(values)


def _document(values: list[_Value]) -> OutputDocument:
    """The one object of an implicit export."""
    value = values[0].value
    if len(values) > 1:
        output_invalid(
            f"it holds {len(values)} JSON values; write one object, or records with `messages` and `name`, one per line"
        )
    if not isinstance(value, dict):
        listed = isinstance(value, list) and any(isinstance(item, dict) and "messages" in item for item in value)
        remedy = (
            "write each record on a line of its own, without a list around them" if listed else "write one JSON object"
        )
        output_invalid(f"it holds {shown(value)}; {remedy}")
    return OutputDocument(
        reward=value.get("reward"),
        metadata=_metadata(value, "the output file"),
        ignored=tuple(key for key in value if key not in ("metadata", "reward")),
    )


# -- records --------------------------------------------------------------------------------------------------------


def _where(name: object, line: int) -> str:
    return f"record {shown(name)} (line {line} of the output file)"


def _records(values: list[_Value]) -> Iterator[OutputRecord]:
    line_of: dict[str, int] = {}
    for item in values:
        value = item.value
        if not isinstance(value, dict):
            output_invalid(f"line {item.line} holds {shown(value)}; each line must be a record, one JSON object")
        if "messages" not in value:
            named = value.get("name")
            where = f"the record in line {item.line} of the output file" if named is None else _where(named, item.line)
            record_invalid(
                where,
                "messages is missing, and other lines have it; a record needs the whole history of its context, and an "
                "object for the session as a whole must stand alone (put its reward and metadata into a record)",
            )
        name = _name(value, item.line)
        if name in line_of:
            record_invalid(
                _where(name, item.line),
                f"its name is that of the record in line {line_of[name]}; names must be unique in a session",
            )
        line_of[name] = item.line
        yield _record(item, value, name)


def _record(item: _Value, value: JsonObject, name: str) -> OutputRecord:
    where = _where(name, item.line)
    messages = value["messages"]
    if not isinstance(messages, list):
        record_invalid(where, f"messages is {shown(messages)}; it must be the list of the context's messages")
    if not messages:
        record_invalid(where, "messages is empty; it must hold the whole history of the context, answers included")
    return OutputRecord(
        name=name,
        line=item.line,
        fields=_raw_fields(item.text, value, where),
        reward=value.get("reward"),
        metadata=_metadata(value, where),
        ignored=tuple(key for key in value if key not in ("name", "metadata", "reward", *HISTORY_KEYS)),
    )


def _name(value: JsonObject, line: int) -> str:
    """The name as the ledger keeps it: two names that look the same there would be one."""
    name = value.get("name")
    where = f"the record in line {line} of the output file"
    if name is None:
        record_invalid(where, 'name is missing; each record needs a unique name, such as "name": "main"')
    if not isinstance(name, str):
        record_invalid(where, f"name is {shown(name)}; it must be a text")
    if not name.strip():
        record_invalid(where, f"name is {shown(name)}; it must not be empty")
    if len(name) > MAX_NAME_CHARS:
        record_invalid(where, f"name has {len(name)} characters; at most {MAX_NAME_CHARS} are kept")
    return safe_text(name)


def _raw_fields(text: str, value: JsonObject, where: str) -> RawObject:
    try:
        fields = read_body(text.encode())
    except ValueError:
        # A number is not finite. A reward gets its own error; elsewhere no request can have contained it.
        try:
            held = {key: value[key] for key in HISTORY_KEYS if key in value}
            fields = read_body(json.dumps(held, allow_nan=False).encode())
        except (ValueError, RecursionError) as error:
            record_invalid(where, f"it holds what no request can contain: {error}")
    return {key: fields[key] for key in HISTORY_KEYS if key in fields}


def record_invalid(where: str, what: str) -> NoReturn:
    raise SessionFailure(RECORD_INVALID, f"{where} cannot be used: {what}")


# -- metadata -------------------------------------------------------------------------------------------------------


def _metadata(value: JsonObject, where: str) -> JsonObject:
    metadata = value.get("metadata")
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise SessionFailure("metadata_invalid", f"metadata in {where} is {shown(metadata)}; it must be an object")
    unfit = _unfit(metadata)
    if unfit is not None:
        path, why = unfit
        raise SessionFailure("metadata_invalid", f"{shown('metadata' + path)} in {where} {why}")
    return metadata


def _unfit(value: object, depth: int = 1) -> tuple[str, str] | None:
    """What no ledger can keep: numbers that are not finite or exceed 64 bits, broken text, deep nests.

    The path of the first such value inside `value`, and what is wrong with it.
    """
    if depth > _MAX_DEPTH:
        return "", f"lies more than {_MAX_DEPTH} levels deep"
    if isinstance(value, dict):
        broken = next((key for key in value if SURROGATE.search(key)), None)
        if broken is not None:
            return f".{broken[:MAX_SHOWN]}", f"has a name that {_HALF}"
        # The path becomes text only behind a fault: many values may lie under one long key.
        found = ((f".{key[:MAX_SHOWN]}", _unfit(item, depth + 1)) for key, item in value.items())
    elif isinstance(value, list):
        found = ((f"[{at}]", _unfit(item, depth + 1)) for at, item in enumerate(value))
    elif isinstance(value, str) and SURROGATE.search(value):
        return "", _HALF
    elif isinstance(value, float) and not math.isfinite(value):
        return "", f"is {value}; it must be finite (leave it out, or write null)"
    elif isinstance(value, int) and not -(1 << 63) <= value < (1 << 64):
        return "", f"is {shown(value)}, which needs more than 64 bits; write it as a string"
    else:
        return None
    return next(((step + unfit[0], unfit[1]) for step, unfit in found if unfit is not None), None)


# -- JSON -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Value:
    """One JSON value of the file, its text, and the line in which it begins."""

    value: object
    text: str
    line: int


def _values(text: str) -> Iterator[_Value]:
    """The values of the file: one, written over as many lines as it likes, or several, each on a line of its own."""
    begin, line, read = _skip_blank(text, 0), 1, 0
    while begin < len(text):
        line += text.count("\n", read, begin)
        read = begin
        value, end = _decode_at(text, begin)
        rest = _skip_blank(text, end)
        if rest < len(text) and ("\n" in text[begin:end] or "\n" not in text[end:rest]):
            output_invalid(
                f"{_place(text, rest)} follows a complete JSON value; it goes on with {shown(text[rest:])}. Several "
                "records are written one per line"
            )
        yield _Value(value, text[begin:end], line)
        begin = rest


def _decode_at(text: str, begin: int) -> tuple[object, int]:
    try:
        return read_json_at(text, begin)
    except json.JSONDecodeError as error:
        output_invalid(
            f"it is not valid JSON at line {error.lineno} column {error.colno}: {error.msg}; the value starts with "
            f"{shown(text[begin : begin + MAX_SHOWN + 1])}"
        )
    except JsonFault as fault:
        output_invalid(f"the JSON value at {_place(text, begin)}: {fault}")


def _skip_blank(text: str, begin: int) -> int:
    match = _REST_BLANK.match(text, begin)
    return match.end() if match is not None else begin


def _place(text: str, at: int) -> str:
    return f"line {text.count(chr(10), 0, at) + 1} column {at - text.rfind(chr(10), 0, at)}"


def output_invalid(what: str) -> NoReturn:
    raise SessionFailure("output_invalid", f"the output file cannot be used: {what}")
