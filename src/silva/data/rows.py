"""Dataset rows: JSON Lines or Parquet to session inputs, validated as a whole before anything starts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from silva.data.options import DataOptions
from silva.data.parquet import parquet_rows
from silva.types import DatasetError, JsonObject, SessionInput, finite_number, read_json

MAX_SHOWN_ERRORS = 10
MAX_DEPTH = 64
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One usable dataset row."""

    line: int
    """Its line in the file (Parquet: its row), from 1."""
    input: SessionInput
    """What agents get."""
    label: object = None
    """What only the judges of a session see, any JSON value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """The usable rows of one file."""

    path: Path
    """The file."""
    rows: tuple[Row, ...]
    """In file order, at least one."""
    num_skipped: int = 0
    """Broken rows that were left out (--skip-bad-rows)."""
    keys_without_label: tuple[str, ...] = ()
    """Some keys of the rows, where no row has the --label-key; else empty."""

    def order(self, epoch: int, *, shuffle: bool, seed: int) -> list[int]:
        """Row indices in the order of one epoch; depends on the arguments alone."""
        indices = list(range(len(self.rows)))
        if shuffle:
            random.Random(f"{seed}:{epoch}").shuffle(indices)
        return indices


def load_dataset(path: Path, options: DataOptions) -> Dataset:
    """Read a JSON Lines file, or a Parquet file where the path ends in `.parquet`.

    A row needs a text or message list under the input key, an object under the metadata key, or both; its label is
    whatever is under the label key, else None. Raises DatasetError with the first ten broken lines, unless they are
    dropped and counted (--skip-bad-rows).
    """
    label_key = options.label_key
    rows: list[Row] = []
    errors: list[str] = []
    labelled, seen = False, dict[str, None]()
    for number, text in _lines(path):
        try:
            row = _read_object(text)
            label = None if label_key is None else row.get(label_key)
            labelled |= label_key in row
            seen.update(dict.fromkeys(list(row)[:8]) if len(seen) < 8 else {})
            rows.append(Row(line=number, input=_read_input(row, options), label=label))
        except ValueError as error:
            errors.append(f"{'row' if _is_parquet(path) else 'line'} {number}: {error}")
    if errors and not options.skip_bad_rows:
        shown = "\n  ".join(errors[:MAX_SHOWN_ERRORS])
        raise DatasetError(
            f"dataset {path}: {len(errors)} of {len(errors) + len(rows)} rows cannot be used; repair them or pass "
            f"--skip-bad-rows. The first:\n  {shown}"
        )
    if not rows:
        raise DatasetError(f"dataset {path} has no usable row")
    return Dataset(
        path=path,
        rows=tuple(rows),
        num_skipped=len(errors),
        keys_without_label=() if labelled or label_key is None else tuple(seen),
    )


def _is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet"


def _lines(path: Path) -> Iterator[tuple[int, bytes | Mapping[str, object]]]:
    if _is_parquet(path):
        yield from parquet_rows(path)
        return
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise DatasetError(f"dataset {path} cannot be read: {error.strerror or error} ({path.absolute()})") from error


def _read_object(line: bytes | Mapping[str, object]) -> Mapping[str, object]:
    if isinstance(line, Mapping):
        return line
    try:
        row = read_json(line.decode("utf-8-sig"), parse_float=finite_number)
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, not {type(row).__name__}")
    _check_depth(row)
    return row


def _check_depth(row: JsonObject) -> None:
    """Raise ValueError for what is nested too deeply for the tools of the processes that it is passed to."""
    layer: list[JsonObject | list[object]] = [row]
    for _ in range(MAX_DEPTH):
        layer = [
            item
            for value in layer
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, dict | list)
        ]
        if not layer:
            return
    raise ValueError(f"nested more than {MAX_DEPTH} levels deep")


def _read_input(row: Mapping[str, object], options: DataOptions) -> SessionInput:
    input_key, metadata_key = options.input_key, options.metadata_key
    messages = None if row.get(input_key) is None else _read_messages(row[input_key], input_key)
    metadata = row.get(metadata_key)
    if metadata is not None and not isinstance(metadata, dict):
        raise ValueError(f"{metadata_key!r} must be an object, not {type(metadata).__name__}")
    if messages is None and metadata is None:
        raise ValueError(f"it has neither {input_key!r} nor {metadata_key!r}; its keys are {sorted(row)[:8]}")
    return SessionInput(messages=messages, metadata=metadata)


def _read_messages(value: object, key: str) -> list[JsonObject]:
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{key!r} is blank")
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key!r} must be a text or a list of messages that is not empty")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(f"{key}[{index}] must be a message object with a role of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), (str, list)) and message["role"] != "assistant":
            raise ValueError(f"{key}[{index}].content must be a text or a list of parts")
    return value
