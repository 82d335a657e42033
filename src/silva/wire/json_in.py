"""Reads JSON that strangers send: every fault becomes a RequestError, nothing else gets out."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from silva.types import RequestError, TooDeep, finite_number, read_json, shown_field

T = TypeVar("T")
RawObject = dict[str, msgspec.Raw]

_object_decoder = msgspec.json.Decoder(RawObject)
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_value_decoder = msgspec.json.Decoder(Any)


def read_body(body: bytes) -> RawObject:
    """The fields of a request body, their values not parsed yet.

    Escaped surrogates without a partner, which no encoder can write again, become U+FFFD.
    """
    try:
        return _object_decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _malformed("the request body must be a JSON object", None) from error
    except msgspec.DecodeError as error:
        if b"\\ud" not in body and b"\\uD" not in body:
            raise _malformed(f"the request body is no valid JSON: {error}", None) from error
    except RecursionError as error:
        raise _too_deep(None) from error
    value = _read_with_surrogates(body)
    if not isinstance(value, dict):
        raise _malformed("the request body must be a JSON object", None)
    return _object_decoder.decode(msgspec.json.encode(value))


def read_object(raw: msgspec.Raw | bytes, field: str) -> RawObject:
    """The fields of a nested object. `field` is its path, for the error."""
    try:
        return _object_decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise _malformed(f"{field} must be an object", field) from error
    except RecursionError as error:
        raise _too_deep(field) from error


def read_list(raw: msgspec.Raw | bytes, field: str) -> list[msgspec.Raw]:
    """The items of a list, not parsed yet."""
    try:
        return _list_decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise _malformed(f"{field} must be a list", field) from error
    except RecursionError as error:
        raise _too_deep(field) from error


def read_value(raw: msgspec.Raw | bytes | None, field: str) -> Any:
    """A whole value; an absent one is None."""
    if raw is None:
        return None
    try:
        return _value_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(f"{field} cannot be read: {error}", field) from error
    except RecursionError as error:
        raise _too_deep(field) from error


def read_optional(raw: msgspec.Raw | None, field: str, kind: type[T], what: str) -> T | None:
    """A value of one type, `what` in words; None where it is absent or null."""
    value = read_value(raw, field)
    if value is not None and not isinstance(value, kind):
        raise must_be(what, value, field)
    return value


def read_string(raw: msgspec.Raw | None, field: str) -> str:
    """A string that must be there."""
    value = read_value(raw, field)
    if not isinstance(value, str):
        raise must_be("a string", value, field)
    return value


def must_be(what: str, value: object, field: str, code: str = "invalid_request") -> RequestError:
    """The error for a value at path `field` that is not `what`."""
    return RequestError(f"{field} is {shown_field(value)}; it must be {what}", field=field, code=code)


def _read_with_surrogates(body: bytes) -> object:
    try:
        return _scrub(read_json(body.decode(), parse_float=finite_number))
    except UnicodeDecodeError as error:
        raise _malformed(f"the request body is no valid UTF-8: {error.reason} at byte {error.start}", None) from error
    except (TooDeep, RecursionError) as error:
        raise _too_deep(None) from error
    except ValueError as error:
        raise _malformed(f"the request body is no valid JSON: {error}", None) from error


def _scrub(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_scrub(item) for item in value]
    if isinstance(value, dict):
        return {_scrub(key): _scrub(item) for key, item in value.items()}
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 4096:
        raise ValueError("a number is out of range")
    return value


def _malformed(message: str, field: str | None) -> RequestError:
    return RequestError(message, field=field, code="invalid_json" if field is None else "invalid_value")


def _too_deep(field: str | None) -> RequestError:
    where = field or "the request body"
    return RequestError(f"{where} is nested too deeply", field=field, code="nested_too_deeply")
