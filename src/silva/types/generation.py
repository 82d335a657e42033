"""What goes to an engine and what comes back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]

LOWEST_LOGPROB = -3.4e38
"""Log-probs are kept in 32 bits."""
LOGPROB_ROUNDING = 1e-3
"""How far above 0 rounding may lift one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one attempt samples. Temperature 0 is argmax. `top_k` -1 and `top_p` 1 switch those filters off.

    The random numbers of a `seed` belong to absolute positions, so attempts that resume a turn keep its seed.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature is {self.temperature}; it must be a finite number >= 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must lie in (0, 1]")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be -1 (off) or at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSpan:
    """`length` ids from `start` (counted in the ids of the same list) sampled by weight version `version`."""

    start: int
    length: int
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """An image that belongs to a prompt: the file that holds its bytes, or the web address that stands for it.

    `digest` is the hex SHA-256 of the bytes, or of the address.
    """

    kind: Literal["image"]
    digest: str
    path: Path | None = None
    url: str | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.url is None):
            raise ValueError(f"image {self.digest} needs a file or an address, one of them")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One engine attempt. No request id may be a prefix of another one (some engines abort by prefix).

    The last `num_resumed` of `input_ids` were sampled by earlier, aborted attempts of the same turn: a stop string may
    begin in them. `media` are all images of the context, in the order in which they stand in it. `input_ids` may be
    joined anew each time they are read: make a list of them to read more than one, and let it go when it was used.
    """

    request_id: str
    session_id: str
    input_ids: Sequence[int]
    sampling: SamplingParams
    attempt: int = 0
    media: tuple[Media, ...] = ()
    num_resumed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateResult:
    """The ids that one attempt sampled, in order, with everything that belongs to each id.

    `logprobs` are those of the sampled ids under softmax(logits / T), before top-p and top-k (natural log, <= 0);
    `kept_mass` is the probability that top-p and top-k left in play (1.0 where both are off). All three lists have one
    entry an id. The stop id, where one was sampled, is the last id; nothing follows it. A matched stop string keeps its
    ids. `version_spans` cover the ids without gaps. `cached_tokens` counts prompt ids that were not prefilled again.
    `matched_stop` is the stop string or stop id that ended the attempt.
    """

    ids: list[int]
    logprobs: list[float]
    kept_mass: list[float]
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    cached_tokens: int = 0
    matched_stop: str | int | None = None

    def __post_init__(self) -> None:
        n = len(self.ids)
        if len(self.logprobs) != n or len(self.kept_mass) != n:
            raise ValueError(
                f"an engine result holds {n} ids, {len(self.logprobs)} logprobs and {len(self.kept_mass)} kept masses"
            )
        check_spans(self.version_spans, n)
        if not all(map(math.isfinite, self.logprobs)):
            raise ValueError("an engine result holds a log-prob that is not finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineUsage:
    """What an engine holds now. `kv_used_ratio` lies in [0, 1]."""

    kv_used_ratio: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    counters: dict[str, int] = field(default_factory=dict[str, int])


def check_spans(spans: tuple[VersionSpan, ...], num_ids: int) -> None:
    """Raise ValueError unless the spans cover exactly the ids 0..num_ids, in order, without gaps."""
    at = 0
    for span in spans:
        if span.start != at or span.length < 1:
            raise ValueError(f"version spans leave a gap or overlap at id {at}: {spans}")
        at += span.length
    if at != num_ids:
        raise ValueError(f"version spans cover {at} ids, the result holds {num_ids}")


def append_span(spans: tuple[VersionSpan, ...], length: int, version: int) -> tuple[VersionSpan, ...]:
    """`spans` followed by `length` more ids of `version`; equal neighbours become one span."""
    return join_spans((*spans, VersionSpan(start=0, length=length, version=version)))


def join_spans(parts: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """The spans of id lists in a row, counted over all ids; equal neighbours become one span, empty ones go."""
    joined: list[VersionSpan] = []
    at = 0
    for part in parts:
        if part.length == 0:
            continue
        if joined and joined[-1].version == part.version:
            last = joined.pop()
            joined.append(VersionSpan(start=last.start, length=last.length + part.length, version=last.version))
        else:
            joined.append(VersionSpan(start=at, length=part.length, version=part.version))
        at += part.length
    return tuple(joined)
