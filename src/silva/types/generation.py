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
    """Most ids of this attempt."""
    temperature: float = 1.0
    """0 is argmax."""
    top_p: float = 1.0
    """Probability mass that stays in play; 1 is off."""
    top_k: int = -1
    """Number of ids that stay in play; -1 is off."""
    stop: tuple[str, ...] = ()
    """Texts that end the attempt."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the attempt."""
    seed: int | None = None
    """Seed of the turn; None: the engine's own."""

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
    """Place of its first id in the list."""
    length: int
    """Number of ids."""
    version: int
    """The weight version that sampled them; -1: they were not sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """An image that belongs to a prompt: the file with its bytes, or its web address."""

    kind: Literal["image"]
    """What it is."""
    digest: str
    """Hex SHA-256 of its bytes, or of its address."""
    path: Path | None = None
    """The file with its bytes; None where it has an address."""
    url: str | None = None
    """Its web address; None where it has a file."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.url is None):
            raise ValueError(f"image {self.digest} needs a file or an address, one of them")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One engine attempt. No request id may be a prefix of another one (some engines abort by prefix).

    A stop string may begin in the ids of earlier attempts.
    """

    request_id: str
    """Of the turn; no id is a prefix of another one, since some engines abort by prefix."""
    session_id: str
    """Whose turn it is, for routing and caches."""
    input_ids: Sequence[int]
    """The whole context. May be joined anew at each read: make a list of it to read more than one id."""
    sampling: SamplingParams
    """How it samples."""
    attempt: int = 0
    """Attempts of the turn before this one."""
    media: tuple[Media, ...] = ()
    """All images of the context, in order."""
    num_resumed: int = 0
    """The last so many input ids were sampled by earlier, aborted attempts of the turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateResult:
    """The ids that one attempt sampled, in order, with everything that belongs to each id.

    Example: `ids=[5, 9]`, `logprobs=[-0.1, -2.3]`, `kept_mass=[1.0, 1.0]`, `finish_reason="stop"`, `matched_stop=9`.
    """

    ids: list[int]
    """Sampled ids in order, [N]. A sampled stop id is the last; a matched stop string keeps its ids."""
    logprobs: list[float]
    """Natural log under softmax(logits / T), before top-p and top-k, at most 0, [N]."""
    kept_mass: list[float]
    """Probability that top-p and top-k left in play, 1.0 where both are off, [N]."""
    finish_reason: FinishReason
    """Why it ended."""
    version_spans: tuple[VersionSpan, ...]
    """Weight versions over the N ids, without gaps."""
    cached_tokens: int = 0
    """Prompt ids that were not prefilled again."""
    matched_stop: str | int | None = None
    """The stop string or stop id that ended it; None where neither did."""

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
    """What an engine carries now."""

    kv_used_ratio: float = 0.0
    """Share of the cache in use, 0 to 1."""
    num_running: int = 0
    """Requests that are decoded."""
    num_waiting: int = 0
    """Requests that wait for a place."""
    counters: dict[str, int] = field(default_factory=dict[str, int])
    """Counts since the start, by name."""


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
