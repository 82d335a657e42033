"""Turns one request into as many engine calls as it takes: aborts keep their partial ids, faults are retried."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from silva.inference import Engine, answer_in_time
from silva.turns.session import Session
from silva.types import (
    LOGPROB_ROUNDING,
    LOWEST_LOGPROB,
    AttemptRow,
    Clock,
    EngineFault,
    GenerateRequest,
    GenerateResult,
    Media,
    SamplingParams,
    VersionSpan,
    append_span,
)

MAX_ID = (1 << 31) - 1
IDLE_ABORT_PAUSE_S = 0.05
MAX_IDLE_ABORT_PAUSE_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """All that a turn sampled, over its attempts."""

    result: GenerateResult
    """The attempts joined into one."""
    num_aborts: int
    """Attempts that the engine aborted."""
    wait_s: float
    """Seconds that the turn waited for the session's gate."""


@dataclass(eq=False)
class EngineClient:
    """Consumes a prompt, produces its generation, waits for the session's gate and the engine; woken by both.

    A faulty attempt is retried after each of `retry_delays_s`; an attempt that succeeds restores all retries. An
    aborted attempt is continued, or without `resume` repeated from the prompt. `counters` counts `engine_fault`,
    `engine_abort` and `cut_after_stop_id`.
    """

    engine: Engine
    """Samples."""
    clock: Clock
    """Times attempts and pauses."""
    _: KW_ONLY
    timeout_s: float
    """Seconds without an answer after which an attempt counts as failed."""
    retry_delays_s: tuple[float, ...]
    """Pauses before a faulty attempt is made again: one retry each."""
    resume: bool = True
    """An aborted attempt continues behind its ids; else it is made again from the prompt."""

    def __post_init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self._running: dict[str, str] = {}

    async def sample(
        self,
        session: Session,
        *,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        media: tuple[Media, ...] = (),
    ) -> Generation:
        """Sample one turn to its end. Raises EngineFault when the engine fails after the last retry."""
        parts: list[GenerateResult] = []
        ids: list[int] = []
        wait_s, cached_tokens = 0.0, None
        num_faults = num_idle = num_aborts = attempt = 0
        while True:
            waiting_since_s = self.clock.monotonic_s()
            await session.gate.wait()
            wait_s += self.clock.monotonic_s() - waiting_since_s
            left = replace(sampling, max_new_tokens=sampling.max_new_tokens - len(ids)) if ids else sampling
            request = GenerateRequest(
                request_id=request_id,
                session_id=session.session_id,
                input_ids=array("i", (*prompt_ids, *ids)) if ids else prompt_ids,
                sampling=left,
                attempt=attempt,
                num_resumed=len(ids),
                media=media,
            )
            attempt += 1
            result = await self._attempt(session, request, may_fail=num_faults < len(self.retry_delays_s))
            if result is None:
                await self.clock.sleep(self.retry_delays_s[num_faults])
                num_faults += 1
                continue
            num_faults = 0
            parts.append(result)
            ids.extend(result.ids)
            cached_tokens = result.cached_tokens if cached_tokens is None else cached_tokens
            num_aborts += result.finish_reason == "abort"
            if result.finish_reason != "abort" or len(ids) >= sampling.max_new_tokens:
                whole = _joined(parts, ids, cached_tokens)
                return Generation(result=whole, num_aborts=num_aborts, wait_s=wait_s)
            if not self.resume:
                parts, ids = [], []
            num_idle = 0 if result.ids and self.resume else num_idle + 1
            if num_idle:
                await self.clock.sleep(min(IDLE_ABORT_PAUSE_S * 2 ** min(num_idle, 8), MAX_IDLE_ABORT_PAUSE_S))

    async def abort_running(self, session_ids: Iterable[str] | None = None) -> int:
        """Abort the running attempts of these sessions (None: of all). Returns how many there were."""
        wanted = None if session_ids is None else set(session_ids)
        ids = [request_id for request_id, owner in self._running.items() if wanted is None or owner in wanted]
        for request_id in ids:
            await self.engine.abort(request_id)
        return len(ids)

    async def _attempt(self, session: Session, request: GenerateRequest, *, may_fail: bool) -> GenerateResult | None:
        """One engine call, with its row. Returns None where it failed and may be retried."""
        started_s = session.since_start_s()
        result: GenerateResult | None = None
        error = "cancelled"
        try:
            self._running[request.request_id] = request.session_id
            result = self._checked(request, await self._generate(request))
            self.counters["engine_abort"] += result.finish_reason == "abort"
            return result
        except EngineFault as fault:
            error = str(fault)
            self.counters["engine_fault"] += 1
            if not may_fail:
                raise
            return None
        finally:
            self._running.pop(request.request_id, None)
            session.attempts.append(_record(session, request, result, started_s, error))

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        async with answer_in_time(self.clock, self.timeout_s, "the engine"):
            return await self.engine.generate(request)

    def _checked(self, request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        """The answer, cut after its first stop id. Raises EngineFault where it breaks the engine's contract."""
        if not result.ids:
            if result.finish_reason == "abort":
                return result
            raise EngineFault(f"the engine ended request {request.request_id} ({result.finish_reason}) without any id")
        if min(result.ids) < 0 or max(result.ids) > MAX_ID:
            raise EngineFault(f"the engine returned an id that no vocabulary has for request {request.request_id}")
        if len(result.ids) > request.sampling.max_new_tokens:
            raise EngineFault(
                f"the engine returned {len(result.ids)} ids for request {request.request_id}, which asked for at most "
                f"{request.sampling.max_new_tokens}"
            )
        if min(result.logprobs) < LOWEST_LOGPROB or max(result.logprobs) > LOGPROB_ROUNDING:
            raise EngineFault(
                f"the engine returned log-probs from {min(result.logprobs):g} to {max(result.logprobs):g} for request "
                f"{request.request_id}; a log-prob is at most 0 and fits into 32 bits"
            )
        sampled = set(result.ids)
        at = min((result.ids.index(stop) for stop in request.sampling.stop_token_ids if stop in sampled), default=None)
        if at is None:
            return result
        if at + 1 < len(result.ids):
            self.counters["cut_after_stop_id"] += 1
            result = cut_ids(result, at + 1)
        if result.finish_reason == "stop" and result.matched_stop == result.ids[at]:
            return result
        return replace(result, finish_reason="stop", matched_stop=result.ids[at])


def _joined(parts: Sequence[GenerateResult], ids: list[int], cached_tokens: int) -> GenerateResult:
    """All attempts of a turn as one. An abort that came exactly at the end of the budget is a turn cut by length."""
    last = parts[-1]
    if len(last.ids) == len(ids) and last.finish_reason != "abort":
        return last
    spans: tuple[VersionSpan, ...] = ()
    for span in (span for part in parts for span in part.version_spans):
        spans = append_span(spans, span.length, span.version)
    return replace(
        last,
        ids=ids,
        logprobs=[value for part in parts for value in part.logprobs],
        kept_mass=[value for part in parts for value in part.kept_mass],
        finish_reason="length" if last.finish_reason == "abort" else last.finish_reason,
        version_spans=spans,
        cached_tokens=cached_tokens,
    )


def cut_ids(result: GenerateResult, num_ids: int) -> GenerateResult:
    """The first `num_ids` ids of a result, with everything that belongs to them."""
    spans: tuple[VersionSpan, ...] = ()
    for span in result.version_spans:
        spans = append_span(spans, max(0, min(span.length, num_ids - span.start)), span.version)
    return replace(
        result,
        ids=result.ids[:num_ids],
        logprobs=result.logprobs[:num_ids],
        kept_mass=result.kept_mass[:num_ids],
        version_spans=spans,
    )


def derived_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends only on the parts."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big") >> 1


def _record(
    session: Session, request: GenerateRequest, result: GenerateResult | None, started_s: float, error: str
) -> AttemptRow:
    spans = result.version_spans if result else ()
    return AttemptRow(
        request_id=request.request_id,
        attempt=request.attempt,
        num_input=len(request.input_ids),
        num_output=len(result.ids) if result else 0,
        finish_reason=result.finish_reason if result else "error",
        weight_version=spans[-1].version if spans else None,
        cached_tokens=result.cached_tokens if result else 0,
        started_s=started_s,
        ended_s=session.since_start_s(),
        error=None if result else error,
    )
