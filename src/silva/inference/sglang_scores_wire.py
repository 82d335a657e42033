"""How log-probs of given ids are requested from an SGLang server, and how its answer is read and checked."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from silva.inference.sglang_wire import check_rid, decode_answer
from silva.types import LOGPROB_ROUNDING, LOWEST_LOGPROB, EngineFault


class _Finish(msgspec.Struct, frozen=True):
    type: str
    message: object = None


class _Meta(msgspec.Struct, frozen=True):
    input_token_logprobs: list[tuple[float | None, int, object]]
    id: str | None = None
    prompt_tokens: int | None = None
    finish_reason: _Finish | None = None


class _Answer(msgspec.Struct, frozen=True):
    meta_info: _Meta


_decoder = msgspec.json.Decoder(_Answer)


class OtherTokenizer(EngineFault):
    """The server reads ids as other tokens than were sent, so none of its scores count."""


def encode_score_request(ids: Sequence[int], start: int, rid: str, *, with_texts: bool = False) -> bytes:
    """The body of POST /generate that samples nothing. `start`: the first id whose successor is to be scored."""
    body: dict[str, object] = {
        "rid": rid,
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start,
        "stream": False,
    }
    if with_texts:
        body["return_text_in_logprobs"] = True
    return msgspec.json.encode(body)


def read_scores(ids: Sequence[int], start: int, rid: str, body: bytes) -> list[float]:
    """Natural log-probs of `ids[start + 1:]` at temperature 1.

    Raises EngineFault where the answer is no JSON, has a field of a wrong type or length, answers another request, or
    contains what cannot be a log-prob; OtherTokenizer where it is about other ids.
    """
    entries = _entries(ids, start, rid, body)
    scores: list[float] = []
    for at, (logprob, token, _) in enumerate(entries[1:], start + 1):
        if logprob is None or not LOWEST_LOGPROB <= logprob <= LOGPROB_ROUNDING:
            raise EngineFault(f"its answer gives id {token} at place {at} the log-prob {logprob}")
        scores.append(logprob)
    return scores


def read_texts(ids: Sequence[int], rid: str, body: bytes) -> list[str | None]:
    """What the server's tokenizer reads each of `ids` as; None where it does not say. Raises as `read_scores`."""
    return [text if isinstance(text, str) else None for _, _, text in _entries(ids, 0, rid, body)]


def _entries(ids: Sequence[int], start: int, rid: str, body: bytes) -> list[tuple[float | None, int, object]]:
    meta = decode_answer(_decoder, body).meta_info
    check_rid(meta.id, rid)
    if meta.finish_reason is not None and meta.finish_reason.type == "abort":
        raise EngineFault(f"it aborted the request: {meta.finish_reason.message}")
    if meta.prompt_tokens is not None and meta.prompt_tokens != len(ids):
        raise EngineFault(f"it read {meta.prompt_tokens} ids where {len(ids)} were sent; is it allowed to truncate?")
    entries = meta.input_token_logprobs
    if len(entries) != len(ids) - start:
        raise EngineFault(f"its answer holds {len(entries)} input_token_logprobs for ids {start} to {len(ids) - 1}")
    for at, (_, token, _) in enumerate(entries, start):
        if token != ids[at]:
            raise OtherTokenizer(f"its answer is about id {token} at place {at} where id {ids[at]} was sent")
    return entries
