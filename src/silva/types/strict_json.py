"""One reader of JSON that others wrote: request bodies, output files, dataset rows, call arguments, dumps.

It raises `ValueError` for everything, and it accepts only what every other reader accepts too. Callers choose:

    read_json('{"a": NaN}')                          JsonFault: NaN is no JSON value
    read_json('{"a": 1, "a": 2}')                    {"a": 2}
    read_json('{"a": 1, "a": 2}', unique_keys=True)  JsonFault: the key 'a' occurs twice in one object
    read_json("1e999")                               inf
    read_json("1e999", parse_float=finite_number)    JsonFault: the number 1e999 is out of range
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager

_MAX_SHOWN = 60


class JsonFault(ValueError):
    """Well-formed text that is still refused. (Text that is not JSON at all is a `json.JSONDecodeError`.)"""


class TooDeep(JsonFault):
    """Nested deeper than Python can read."""


def read_json(
    text: str | bytes,
    *,
    unique_keys: bool = False,
    constants: bool = False,
    parse_float: Callable[[str], object] | None = None,
) -> object:
    """The value of a JSON text.

    `unique_keys` refuses a key that an object has twice, `constants` accepts NaN and the infinities, `parse_float`
    makes the value of a number with a fraction or an exponent. Raises ValueError.
    """
    with _faults():
        return json.loads(
            text,
            parse_constant=None if constants else _refuse_constant,
            parse_float=parse_float,
            object_pairs_hook=_unique_keys if unique_keys else None,
        )


def read_json_at(text: str, begin: int) -> tuple[object, int]:
    """The value that starts at `begin`, and where it ends. Keys are unique, NaN and the infinities are accepted."""
    with _faults():
        return _UNIQUE_KEYS.raw_decode(text, begin)


def finite_number(text: str) -> float:
    """For `parse_float`: a number that a 64-bit float can hold."""
    value = float(text)
    if not math.isfinite(value):
        raise JsonFault(f"the number {text[:_MAX_SHOWN]} is out of range")
    return value


def _refuse_constant(text: str) -> object:
    raise JsonFault(f"{text} is no JSON value")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonFault(f"the key {key[:_MAX_SHOWN]!a} occurs twice in one object")
            seen.add(key)
    return value


_UNIQUE_KEYS = json.JSONDecoder(object_pairs_hook=_unique_keys)


@contextmanager
def _faults() -> Generator[None]:
    try:
        yield
    except (json.JSONDecodeError, UnicodeDecodeError, JsonFault):
        raise
    except RecursionError as error:
        raise TooDeep("it is nested too deeply") from error
    except ValueError as error:
        # The parser has one other refusal: Python converts no integer of more than some thousand digits.
        raise JsonFault("an integer has too many digits") from error
