"""Columns of the run ledger: packed arrays, JSON text that takes any value, and text from any agent."""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import TypeVar

from silva.types import SURROGATE, VersionSpan

_Array = TypeVar("_Array", "array[int]", "array[float]")
_FLOAT32_MAX = 3.4028234663852886e38
_MAX_DEPTH = 200
_MAX_BITS = 10_000
"""Python prints and parses integers of up to 4,300 digits (14,000 bits)."""


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return _little(array("i", ids)).tobytes()


def unpack_ids(blob: bytes) -> list[int]:
    return _unpacked(array("i"), blob).tolist()


def pack_mask(mask: Sequence[int]) -> bytes:
    """A 0/1 mask, one byte an id."""
    return bytes(mask)


def pack_floats(values: Iterable[float]) -> bytes:
    """Finite floats as little-endian float32; what is too large for float32 becomes its largest value."""
    packed = array("f", values)
    if not all(map(math.isfinite, packed)):
        assert not any(map(math.isnan, packed)), "a log-prob or kept mass is NaN"
        packed = array("f", (max(-_FLOAT32_MAX, min(_FLOAT32_MAX, value)) for value in packed))
    return _little(packed).tobytes()


def unpack_floats(blob: bytes) -> list[float]:
    """The float32 values, each as the shortest decimal that reads back as it (-0.1, not -0.10000000149)."""
    return short_floats(_unpacked(array("f"), blob))


def unpack_exact(blob: bytes) -> list[float]:
    """The float32 values as they are."""
    return _unpacked(array("f"), blob).tolist()


def short_floats(exact: Sequence[float]) -> list[float]:
    """Values of float32, each as the shortest decimal that reads back as it."""
    short = [float(f"{value:.7g}") for value in exact]
    for index, (value, rounded) in enumerate(zip(exact, array("f", short), strict=True)):
        if value != rounded:
            short[index] = float(f"{value:.9g}")
    return short


def _unpacked(values: _Array, blob: bytes) -> _Array:
    """`values`, an empty array of int32 or float32, filled. ValueError where the blob ends inside a value."""
    values.frombytes(blob)
    return _little(values)


def _little(values: _Array) -> _Array:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def spans_to_json(spans: Iterable[VersionSpan]) -> str:
    return json.dumps([[span.start, span.length, span.version] for span in spans])


def runs_of(flags: Iterable[bool]) -> list[list[int]]:
    """[start, length] of every run of true flags."""
    runs: list[list[int]] = []
    for index, flag in enumerate(flags):
        if not flag:
            continue
        if runs and sum(runs[-1]) == index:
            runs[-1][1] += 1
        else:
            runs.append([index, 1])
    return runs


def to_column(value: object) -> str:
    """JSON text of any value. NaN, infinities and big integers keep their value when Python reads them back.

    Arrays and their scalars (what has `tolist`) become lists and numbers. What JSON cannot hold becomes text: another
    object its `repr`, an integer too long to print its hexadecimal form. Nests deeper than 200 are cut there, so that
    every reader can take them.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, default=_other)
        if text.count("[") + text.count("{") > _MAX_DEPTH and _too_deep(value):
            text = json.dumps(_plain(value, ()), ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):  # a huge integer, a key that is no text, a cycle, a very deep nest
        text = json.dumps(_plain(value, ()), ensure_ascii=False)
    return text if SURROGATE.search(text) is None else json.dumps(json.loads(text))


def to_json(document: object, *, indent: int | None = None) -> str:
    """One strict JSON document, in ASCII: NaN and infinities become the strings "NaN", "Infinity", "-Infinity"."""
    try:
        return json.dumps(document, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(document), indent=indent, allow_nan=False)


def _too_deep(value: object) -> bool:
    level: list[object] = [value]
    for _ in range(_MAX_DEPTH):
        level = [item for container in level for item in _items(container)]
    return bool(level)


def _items(value: object) -> list[object]:
    """The containers inside a container."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [item for item in items if isinstance(item, dict | list | tuple) and item]


def _plain(value: object, above: tuple[int, ...]) -> object:
    """`value` rebuilt from JSON types only. `above` contains the identities of the containers around it."""
    if isinstance(value, dict | list | tuple):
        if id(value) in above:
            return "(a part of itself)"
        if len(above) >= _MAX_DEPTH:
            return "(nested too deeply to store)"
        inside = (*above, id(value))
        if isinstance(value, dict):
            return {
                key if isinstance(key, str) else _scalar_text(key): _plain(item, inside) for key, item in value.items()
            }
        return [_plain(item, inside) for item in value]
    if value is None or isinstance(value, str | float | bool):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= _MAX_BITS else _scalar_text(value)
    return _plain(_other(value), (*above, id(value)))


def _other(value: object) -> object:
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else repr(value)


def _scalar_text(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return hex(value)
    return repr(value)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
