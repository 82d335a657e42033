"""Continuous batching over our own decoder: the synchronous half of the torch engine, used by one thread.

One `step` admits waiting requests to free slots, runs one forward over all of them (a token of each decoding request,
and up to `prefill_chunk` prompt tokens), samples, and ends what is finished.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from silva.inference.sampling import RowSampling, position_key, sample, seed_base
from silva.inference.slots import CopyPlan, Ids, Slot, SlotTable
from silva.inference.stop_strings import DecodeText, find_stop
from silva.model.decoder import Decoder, KVCache, Segment
from silva.types import (
    EngineFault,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    RequestError,
    SilvaError,
    VersionSpan,
    WeightSource,
    append_span,
)

COUNTERS = (
    "requests",
    "finished_stop",
    "finished_length",
    "aborts",
    "cancelled",
    "faults",
    "steps",
    "decode_steps",
    "decode_rows",
    "max_decode_rows",
    "prefill_tokens",
    "reprefill_tokens",
    "cached_tokens",
    "copied_tokens",
    "sampled_tokens",
    "weight_loads",
)

Outcome = GenerateResult | SilvaError


@dataclass(slots=True, eq=False)
class Running:
    """One request inside the core: what was sampled so far and how to continue."""

    handle: object
    """The caller's name for it."""
    request: GenerateRequest
    """As it came."""
    prompt: Ids
    """Its input ids, checked."""
    seed: int
    """The base of its noise."""
    max_new_tokens: int
    """What the request and the context leave."""
    stop_ids: frozenset[int]
    """Ids that end it."""
    slot: Slot | None = None
    """Its cache slot; None while it waits."""
    restarted: bool = False
    """New weights arrived: it computes its prefix anew."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed for it."""
    ids: list[int] = field(default_factory=list)
    """Sampled so far, as are the lists below."""
    logprobs: list[float] = field(default_factory=list)
    """One per id."""
    kept_mass: list[float] = field(default_factory=list)
    """One per id."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(weight version, number of ids), in order."""

    def add(self, token_id: int, logprob: float, kept_mass: float, version: int) -> None:
        self.ids.append(token_id)
        self.logprobs.append(logprob)
        self.kept_mass.append(kept_mass)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1] + 1)
        else:
            self.spans.append((version, 1))

    def result(self, reason: FinishReason, matched: str | int | None = None) -> GenerateResult:
        spans: tuple[VersionSpan, ...] = ()
        for version, length in self.spans:
            spans = append_span(spans, length, version)
        return GenerateResult(
            ids=self.ids,
            logprobs=self.logprobs,
            kept_mass=self.kept_mass,
            finish_reason=reason,
            version_spans=spans,
            cached_tokens=self.cached_tokens,
            matched_stop=matched,
        )


@dataclass(slots=True)
class _Plan:
    """One forward: the ids and segments for the decoder, and which requests get a token from which row."""

    ids: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    owners: list[Running] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    sampling: list[Running] = field(default_factory=list)


@dataclass(eq=False)
class TorchCore:
    """Requests in (`submit`), outcomes out (`take_finished`), work in `step`. Not thread-safe; no asyncio."""

    decoder: Decoder
    _: KW_ONLY
    max_context_len: int
    """Most tokens of one request, prompt and response together."""
    num_slots: int
    """Requests that are decoded at once."""
    stop_ids: Collection[int]
    decode_text: DecodeText
    """Ids to text, for stop strings."""
    seed: int
    """Seed of requests that bring none."""
    prefill_chunk: int
    """Prompt tokens that one step computes at most."""
    version: int
    """The weight version of the tokens sampled next."""

    def __post_init__(self) -> None:
        self.table = SlotTable(self.num_slots, self.max_context_len)
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self._cache: KVCache = self.decoder.new_cache(self.num_slots, self.max_context_len)
        self._stop_ids = frozenset(self.stop_ids)
        self._finished: list[tuple[object, Outcome]] = []

    # ---- commands, between steps ----

    def submit(self, handle: object, request: GenerateRequest) -> None:
        """Queue a request; its outcome will carry `handle`. An unusable one ends at once with an error."""
        self.counters["requests"] += 1
        sampling = request.sampling
        try:
            prompt = self._checked_prompt(request)
        except RequestError as error:
            self._finished.append((handle, error))
            return
        parts = ("request", self.seed, request.request_id) if sampling.seed is None else ("seed", sampling.seed)
        self.waiting.append(
            Running(
                handle=handle,
                request=request,
                prompt=prompt,
                seed=seed_base(*parts),
                max_new_tokens=min(sampling.max_new_tokens, self.max_context_len - len(prompt)),
                stop_ids=self._stop_ids | frozenset(sampling.stop_token_ids),
            )
        )

    def abort(self, request_id: str) -> None:
        """End a request with what it has, finish reason `abort`. Unknown ids are ignored."""
        found = self._take(lambda one: one.request.request_id == request_id)
        if found is not None:
            self.counters["aborts"] += 1
            self._finished.append((found.handle, found.result("abort")))

    def cancel(self, handle: object) -> None:
        """Forget a request that nobody waits for any more."""
        if self._take(lambda one: one.handle is handle) is not None:
            self.counters["cancelled"] += 1

    def load_weights(self, source: WeightSource) -> None:
        """Replace all weights. Raises ConfigError with the old ones in place. Running requests recompute their keys
        and values and continue."""
        self.decoder.load(dict(source.tensors()))
        self.version = source.version
        self.counters["weight_loads"] += 1
        self.table.invalidate()
        for one in self.running:
            one.restarted = True

    def fail_all(self, message: str) -> None:
        """End every request with an EngineFault and forget all cached content."""
        self.counters["faults"] += len(self.running) + len(self.waiting)
        for one in (*self.running, *self.waiting):
            self._finished.append((one.handle, EngineFault(message)))
            if one.slot is not None:
                self.table.drop(one.slot)
        self.running.clear()
        self.waiting.clear()
        self.table.invalidate()
        self._cache = self.decoder.new_cache(self.table.num_slots, self.max_context_len)

    def take_finished(self) -> list[tuple[object, Outcome]]:
        """Outcomes since the last call, each with its handle."""
        finished, self._finished = self._finished, []
        return finished

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    # ---- one step ----

    def step(self) -> None:
        """Advance all requests by one forward. Needs `has_work`."""
        self._admit()
        plan = self._plan()
        if not plan.segments:
            return
        self._cache.ensure(max(segment.start + segment.length for segment in plan.segments))
        logits = self.decoder.forward(plan.ids, plan.segments, self._cache, plan.logit_rows)
        self._count(plan)
        for segment, one in zip(plan.segments, plan.owners, strict=True):
            assert one.slot is not None
            one.slot.num_filled += segment.length
        if not plan.sampling:
            return
        sampled = sample(logits, [self._row(one) for one in plan.sampling])
        self.counters["sampled_tokens"] += len(plan.sampling)
        for one, token_id, logprob, kept in zip(
            plan.sampling, sampled.ids, sampled.logprobs, sampled.kept_mass, strict=True
        ):
            self._take_token(one, token_id, logprob, kept)

    def _admit(self) -> None:
        while self.waiting:
            one = self.waiting[0]
            slot = self.table.admit(one.request.session_id, one.prompt)
            if slot is None:
                return
            self.waiting.popleft()
            one.slot = slot
            one.cached_tokens = slot.num_filled
            self.counters["cached_tokens"] += slot.num_filled
            self.running.append(one)

    def _plan(self) -> _Plan:
        """Single tokens in slot order first, then longer segments in order of admission, up to the prefill budget."""
        budget = self.prefill_chunk
        single: list[tuple[Segment, Running]] = []
        longer: list[tuple[Segment, Running]] = []
        for one in self.running:
            slot = one.slot
            assert slot is not None
            if slot.donor is not None and self._share(one, slot):
                continue
            length = slot.num_pending
            if length > 1:
                length = min(length, budget)
                budget -= length
            if length:
                part = single if length == 1 else longer
                part.append((Segment(slot.index, slot.num_filled, length), one))
        single.sort(key=lambda entry: entry[0].slot)
        plan = _Plan()
        for segment, one in (*single, *longer):
            assert one.slot is not None
            stop = segment.start + segment.length
            plan.ids += one.slot.buffer[segment.start : stop].tolist()
            plan.segments.append(segment)
            plan.owners.append(one)
            if stop == one.slot.num_ids:
                plan.logit_rows.append(len(plan.ids) - 1)
                plan.sampling.append(one)
        return plan

    def _share(self, one: Running, slot: Slot) -> bool:
        """Take over what another slot has computed. True: wait, it is still computing."""
        copy = self.table.next_copy(slot)
        if not isinstance(copy, CopyPlan):
            return copy
        self._cache.copy(copy.source, slot.index, copy.start, copy.stop)
        num_copied = copy.stop - copy.start
        slot.num_filled = copy.stop
        self.counters["copied_tokens"] += num_copied
        if not one.restarted:
            self.counters["cached_tokens"] += num_copied
            one.cached_tokens += num_copied
        return False

    def _row(self, one: Running) -> RowSampling:
        assert one.slot is not None
        sampling = one.request.sampling
        key = position_key(one.seed, one.slot.num_ids)
        return RowSampling(key, sampling.temperature, sampling.top_p, sampling.top_k)

    def _count(self, plan: _Plan) -> None:
        decode_rows = 0
        for segment, one in zip(plan.segments, plan.owners, strict=True):
            if segment.length == 1 and one.ids and not one.restarted:
                decode_rows += 1
            else:
                self.counters["prefill_tokens"] += segment.length
                self.counters["reprefill_tokens"] += segment.length if one.restarted else 0
        self.counters["steps"] += 1
        self.counters["decode_steps"] += 1 if decode_rows else 0
        self.counters["decode_rows"] += decode_rows
        self.counters["max_decode_rows"] = max(self.counters["max_decode_rows"], decode_rows)

    def _take_token(self, one: Running, token_id: int, logprob: float, kept: float) -> None:
        request, slot = one.request, one.slot
        assert slot is not None
        if not math.isfinite(logprob):
            self._fault(one, f"the model gave logits that are not finite (weight version {self.version})")
            return
        one.restarted = False
        one.add(token_id, logprob, kept, self.version)
        if token_id in one.stop_ids:
            self._finish(one, "stop", token_id)
            return
        slot.append(token_id)
        if request.sampling.stop:
            resumed = request.input_ids[len(request.input_ids) - request.num_resumed :] if request.num_resumed else []
            matched = find_stop([*resumed, *one.ids], request.sampling.stop, self.decode_text)
            if matched is not None:
                self._finish(one, "stop", matched)
                return
        if len(one.ids) >= one.max_new_tokens:
            self._finish(one, "length", None)

    def _finish(self, one: Running, reason: FinishReason, matched: str | int | None) -> None:
        self.counters[f"finished_{reason}"] += 1
        self._finished.append((one.handle, one.result(reason, matched)))
        self._release(one)

    def _fault(self, one: Running, message: str) -> None:
        self.counters["faults"] += 1
        self._finished.append((one.handle, EngineFault(message)))
        self.running.remove(one)
        if one.slot is not None:
            # Stale values that are not finite would reach the next owner through masked positions.
            self._cache.scrub(one.slot.index)
            self.table.drop(one.slot)

    def _release(self, one: Running) -> None:
        self.running.remove(one)
        if one.slot is not None:
            self.table.release(one.slot)
            one.slot = None

    def _take(self, wanted: Callable[[Running], bool]) -> Running | None:
        """Take one request out of the queue or out of its slot."""
        for one in self.waiting:
            if wanted(one):
                self.waiting.remove(one)
                return one
        for one in self.running:
            if wanted(one):
                self._release(one)
                return one
        return None

    def _checked_prompt(self, request: GenerateRequest) -> Ids:
        """The input ids as an array that the decoder can run. Raises RequestError."""
        vocab = self.decoder.config.vocab_size
        ids = list(request.input_ids)
        array = np.array(ids)
        if array.dtype.kind == "i" and array.min() >= 0 and array.max() < vocab:
            return array.astype(np.int32)
        bad = next((i for i, id_ in enumerate(ids) if type(id_) is not int or not 0 <= id_ < vocab), 0)
        raise RequestError(
            f"input_ids[{bad}] is {ids[bad]!r}; ids of this model are whole numbers from 0 to {vocab - 1}",
            field=f"input_ids[{bad}]",
        )
