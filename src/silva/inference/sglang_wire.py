"""What goes to an SGLang server for one attempt, and how its answer is read: every part of it is checked."""

from __future__ import annotations

import base64
from typing import TypeVar

import msgspec

from silva.types import (
    EngineFault,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Media,
    SamplingParams,
    VersionSpan,
    join_spans,
)

_T = TypeVar("_T")

START_VERSION = "default"
"""A server's name for the weights that it was started with, unless it was given another."""
MAX_SEED = (1 << 63) - 1

_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_IMAGE_TYPES = ((b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"), (b"BM", "bmp"))


class _Finish(msgspec.Struct, frozen=True):
    type: str
    matched: object = None


class _Span(msgspec.Struct, frozen=True):
    version: str | int
    start: int
    end: int


class _Meta(msgspec.Struct, frozen=True):
    finish_reason: _Finish
    id: str | None = None
    output_token_logprobs: list[tuple[float, int, object]] | None = None
    weight_version: str | int | None = None
    weight_versions: list[_Span] | None = None
    cached_tokens: int | None = 0
    prompt_tokens: int | None = None


class _Answer(msgspec.Struct, frozen=True):
    output_ids: list[int]
    meta_info: _Meta


_decoder = msgspec.json.Decoder(_Answer)


def attempt_rid(nonce: str, request: GenerateRequest) -> str:
    """The server's name for one attempt. Servers abort by prefix, and no rid is a prefix of another.

    This works because nonces have one length, no request id is a prefix of another, and the attempt has a fixed width.
    """
    return f"{nonce}-{request.request_id}-{request.attempt:08x}"


def encode_request(request: GenerateRequest, rid: str) -> bytes:
    """The body of POST /generate. The server encodes and strips nothing: ids go in, all sampled ids come back."""
    body: dict[str, object] = {
        "rid": rid,
        "input_ids": list(request.input_ids),
        "sampling_params": _params(request.sampling),
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
    }
    if request.media:
        body["image_data"] = [_address(media) for media in request.media]
    return msgspec.json.encode(body)


def _params(sampling: SamplingParams) -> dict[str, object]:
    seed = {} if sampling.seed is None else {"sampling_seed": sampling.seed & MAX_SEED}
    return {
        **seed,
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": False,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }


SENT_PARAMS = frozenset(_params(SamplingParams(max_new_tokens=1, seed=0)))
"""Sampling parameters that each request sets, so that no default of the server applies to them."""


def read_answer(request: GenerateRequest, rid: str, body: bytes, *, version: int) -> GenerateResult:
    """The answer to an attempt. `version` is used where it names no weights.

    Raises EngineFault with the reason where it is no JSON, has a field of a wrong type or length, answers another
    request, or read another prompt than was sent.
    """
    answer = decode_answer(_decoder, body)
    meta, ids = answer.meta_info, answer.output_ids
    _check_belongs(request, rid, meta)
    finish = _FINISHES.get(meta.finish_reason.type)
    if finish is None:
        raise EngineFault(f"its answer has the unknown finish reason {meta.finish_reason.type!r}")
    entries = meta.output_token_logprobs or []
    if len(entries) != len(ids):
        raise EngineFault(f"its answer holds {len(ids)} output_ids and {len(entries)} output_token_logprobs")
    if [token for _, token, _ in entries] != ids:
        at = next(at for at, entry in enumerate(entries) if entry[1] != ids[at])
        raise EngineFault(f"output_token_logprobs[{at}] is that of id {entries[at][1]}, output_ids[{at}] is {ids[at]}")
    try:
        return GenerateResult(
            ids=ids,
            logprobs=[logprob for logprob, _, _ in entries],
            kept_mass=[1.0] * len(ids),
            finish_reason=finish,
            version_spans=_spans(meta, len(ids), version),
            cached_tokens=max(0, meta.cached_tokens or 0),
            matched_stop=_matched(request, meta.finish_reason) if finish == "stop" else None,
        )
    except EngineFault:
        raise
    except ValueError as error:
        raise EngineFault(f"its answer breaks the contract: {error}") from error


def decode_answer(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """The typed answer of a server. Raises EngineFault where it is not JSON of that shape."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineFault(f"its answer cannot be read: {error}") from error


def check_rid(found: str | None, rid: str) -> None:
    """Raise EngineFault where the answer names another request."""
    if found is not None and found != rid:
        raise EngineFault(f"it answered request {found!r} where {rid!r} was asked")


def version_number(value: object) -> int:
    """A server's weight version as a number. Raises EngineFault where it is not one."""
    if value is None or value == START_VERSION:
        return 0
    text = str(value)
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise EngineFault(
            f"its weight version is {value!r}; Silva counts versions, so it must be a whole number or {START_VERSION!r}"
        )
    return int(text)


def _check_belongs(request: GenerateRequest, rid: str, meta: _Meta) -> None:
    check_rid(meta.id, rid)
    sent, read = len(request.input_ids), meta.prompt_tokens
    # An aborted request may never have been read; images take more places than their placeholders.
    if read and read != sent and not request.media:
        raise EngineFault(f"it read {read} prompt tokens where {sent} were sent; is it allowed to truncate?")


def _spans(meta: _Meta, num_ids: int, version: int) -> tuple[VersionSpan, ...]:
    if meta.weight_versions is None:
        if meta.weight_version is not None:
            version = version_number(meta.weight_version)
        return join_spans([VersionSpan(start=0, length=num_ids, version=version)])
    at = 0
    for span in meta.weight_versions:
        if span.start != at or span.end < at:
            raise EngineFault(f"its weight_versions leave a gap or overlap at id {at}")
        at = span.end
    if at != num_ids:
        raise EngineFault(f"its weight_versions cover {at} of {num_ids} ids")
    return join_spans(
        VersionSpan(start=span.start, length=span.end - span.start, version=version_number(span.version))
        for span in meta.weight_versions
    )


def _matched(request: GenerateRequest, finish: _Finish) -> str | int | None:
    """What stopped it: an id, or one of the request's stop strings."""
    matched = finish.matched
    if isinstance(matched, str):
        return matched if matched in request.sampling.stop else None
    return matched if isinstance(matched, int) and not isinstance(matched, bool) else None


def _address(media: Media) -> str:
    """An image as the server takes it: its web address, or its bytes as a data: URI."""
    if media.path is None:
        return str(media.url)
    try:
        data = media.path.read_bytes()
    except OSError as error:
        raise EngineFault(f"image {media.digest} cannot be read again: {error}") from error
    kind = next((name for magic, name in _IMAGE_TYPES if data.startswith(magic)), None)
    if kind is None:
        kind = "webp" if data[8:12] == b"WEBP" else "png"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
