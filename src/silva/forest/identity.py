"""Identity: the canonical form of messages, and the chained keys of conversation states.

`key(state + message) = H(key(state), digest(message))`, and the key of an empty conversation is H(tools, template
kwargs). The canonical form folds what cannot change meaning (key order and spacing of JSON arguments, `1.0` and `1`,
absent and empty text) and keeps everything else.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from functools import lru_cache

from silva.types import Conversation, JsonObject, Message, RequestError, read_json

KEY_BYTES = 16
MAX_REMEMBERED_CHARS = 256
"""Arguments up to this length are remembered: a history brings the same ones in each request."""
MAX_FOLDED_DIGITS = 400
MAX_FOLDED_DEPTH = 100
"""A fixed bound: left to the interpreter's own, identity would depend on how deep the caller's stack is."""

_compact = json.JSONEncoder(separators=(",", ":")).encode
_sorted = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode

_IGNORED_TOOL_KEYS = frozenset({"strict", "cache_control", "defer_loading", "eager_input_streaming"})
_FUNCTION_KEYS = ("name", "description", "parameters")


def root_key(conversation: Conversation) -> bytes:
    """Key of the empty conversation under these tools and template arguments.

    Raises RequestError where they nest too deep, or hold a number that is not finite, which no JSON can carry.
    """
    tools = [canonical_tool(tool) for tool in conversation.tools]
    parts = [_root_part("tools", tools), _root_part("chat_template_kwargs", conversation.template_kwargs)]
    return _hash(b"root", ",".join(parts).encode())


def _root_part(field: str, value: object) -> str:
    try:
        return _canonical_json(value)
    except ValueError as error:
        raise RequestError(f"{field} cannot be read as plain JSON: {error}", field=field) from error


def ids_digest(kind: str, ids: array[int]) -> bytes:
    """Digest of the ids that a caller without messages adds as an observation or a response. No message has it."""
    return _hash(kind.encode(), ids.tobytes())


def chain_key(parent: bytes, digest: bytes) -> bytes:
    """Key of the state that a message leads to."""
    return hashlib.blake2b(parent + digest, digest_size=KEY_BYTES).digest()


def chain_keys(parent: bytes, digests: Sequence[bytes]) -> list[bytes]:
    """Keys after each of the messages, in order."""
    keys: list[bytes] = []
    for digest in digests:
        parent = chain_key(parent, digest)
        keys.append(parent)
    return keys


def message_digest(message: Message) -> bytes:
    """Digest of the canonical form of one message. Images enter by their digest."""
    calls = [[call.id, call.name, canonical_arguments(call.arguments)] for call in message.tool_calls]
    form: list[object] = [message.role, message.content, message.reasoning, calls, message.tool_call_id]
    if message.parts:
        form.append([part if isinstance(part, str) else [part.digest] for part in message.parts])
    return _hash(b"message", _compact(form).encode())


def echo_digest(message: Message) -> bytes:
    """Digest of what even a lossy echo of a message keeps: the trimmed text, and names and arguments of the calls."""
    calls = [[call.name, canonical_arguments(call.arguments)] for call in message.tool_calls]
    return _hash(b"echo", _compact([message.content.strip(), calls]).encode())


def canonical_tool(tool: JsonObject) -> JsonObject:
    """A tool definition without the keys that say nothing about the function, and its own keys in one order.

    This is also what the model reads: tools that count as the same look the same to it, whatever protocol they came by.
    The order inside the parameters is the client's.
    """
    kept = {"type": tool.get("type", "function"), **_telling(tool)}
    function = kept.get("function")
    if isinstance(function, dict):
        inner = _telling(function)  # pyright: ignore
        parameters = inner.get("parameters")
        if isinstance(parameters, dict):
            inner["parameters"] = {k: v for k, v in parameters.items() if k != "$schema"}  # pyright: ignore
        kept["function"] = {key: inner[key] for key in (*_FUNCTION_KEYS, *inner) if key in inner}
    return kept


def _telling(fields: JsonObject) -> JsonObject:
    return {key: value for key, value in fields.items() if key not in _IGNORED_TOOL_KEYS and value is not None}


def canonical_arguments(raw: str) -> str:
    """One text for all spellings of the same JSON arguments.

    Text that is no JSON, has a key twice, nests deeper than MAX_FOLDED_DEPTH, or has a number or half a surrogate
    pair that no client can carry is kept as it is, marked so that it never equals a JSON text.
    """
    return _remembered(raw) if len(raw) <= MAX_REMEMBERED_CHARS else _canonical_arguments(raw)


def _canonical_arguments(raw: str) -> str:
    try:
        value = read_json(raw, unique_keys=True, parse_float=_fold_number)
        if "\\ud" in raw or "\\uD" in raw:
            json.dumps(value, ensure_ascii=False).encode()
        return _canonical_json(value)
    except (ValueError, RecursionError):
        return "raw:" + raw


_remembered = lru_cache(maxsize=2048)(_canonical_arguments)


def is_object_text(raw: str) -> bool:
    """Whether arguments are a JSON object that survives every client as it is."""
    return canonical_arguments(raw).startswith("{")


def _canonical_json(value: object) -> str:
    return _sorted(_fold(value))


def _fold(value: object, depth: int = 0) -> object:
    if isinstance(value, float):
        return _fold_number(repr(value))
    if depth == MAX_FOLDED_DEPTH and isinstance(value, (dict, list, tuple)):
        raise ValueError(f"more than {MAX_FOLDED_DEPTH} levels of nesting")
    if isinstance(value, dict):
        return {str(key): _fold(item, depth + 1) for key, item in value.items()}  # pyright: ignore
    if isinstance(value, (list, tuple)):
        return [_fold(item, depth + 1) for item in value]  # pyright: ignore
    return value


def _fold_number(text: str) -> int | float:
    """A whole number as int, another one as the double that every client makes of it."""
    try:
        exact = Decimal(text)
    except InvalidOperation as error:
        raise ValueError(text) from error
    if exact == 0:
        return 0
    if not exact.is_finite() or abs(exact.adjusted()) > MAX_FOLDED_DIGITS:
        raise ValueError(f"{text} is a number out of range")
    if exact == exact.to_integral_value():
        return int(exact)
    double = float(text)
    return int(Decimal(repr(double))) if double.is_integer() else double


def _hash(kind: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES, person=kind).digest()


TOKEN_ROOT = _hash(b"tokens", b"")
"""Key of the state above all conversations that were given as ids."""
