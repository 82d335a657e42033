"""Rows of a Parquet file as JSON values."""

from __future__ import annotations

import datetime
import math
import uuid
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from silva.types import DatasetError

_BATCH_ROWS = 1024


def parquet_rows(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    """The rows of a file, numbered from 1.

    A cell is converted to a JSON value when it is read; ValueError where it has none. Raises DatasetError for a file
    that cannot be read, and where pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DatasetError(
            f"dataset {path} is a Parquet file, and pyarrow, which reads it, is not installed ({error}): "
            "pip install 'silva[parquet]', or pip install pyarrow"
        ) from error
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise DatasetError(f"dataset {path} has two columns named {twice!r}; keep one")
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                for index in range(batch.num_rows):
                    number += 1
                    yield number, _Row(columns, index)
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"dataset {path} cannot be read as a Parquet file: {error} ({path.absolute()})") from error


class _Row(Mapping[str, object]):
    """One row of a batch of columns."""

    def __init__(self, columns: Mapping[str, Any], index: int):
        self._columns = columns
        self._index = index

    def __getitem__(self, name: str) -> object:
        cell = self._columns[name][self._index]
        try:
            value = cell.as_py(maps_as_pydicts="strict")
        # times that Python's clock types cannot hold; map keys
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise ValueError(f"{name!r} is a {cell.type} that has no JSON value: {error}") from error
        return json_value(value, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def json_value(value: object, where: str) -> object:
    """A cell as a JSON value. Raises ValueError, naming the place, where it has none.

    Bytes are UTF-8 text, times are ISO 8601 text, durations seconds, decimals numbers. A null in a struct is left out:
    the format does not distinguish it from a missing field.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float | Decimal):
        return _number(value, where)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError(f"{where!r} is a map whose keys are not texts")
        return {key: json_value(item, f"{where}.{key}") for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [json_value(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{where!r} is {len(value)} bytes that are not UTF-8 text") from error
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, uuid.UUID):
        return str(value)
    if callable(plain := getattr(value, "tolist", None)):
        return json_value(plain(), where)
    raise ValueError(f"{where!r} is a {type(value).__name__}, which is not a JSON value")


def _number(value: float | Decimal, where: str) -> float | int:
    if not math.isfinite(value):
        raise ValueError(f"{where!r} is {value}, which is not a JSON value")
    if isinstance(value, Decimal) and value == value.to_integral_value():
        return int(value)
    return float(value)
