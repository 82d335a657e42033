"""An engine behind HTTP: one or more servers that speak SGLang's native API."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

import msgspec

from silva.inference.engine import ImageSupport
from silva.inference.sglang_http import READY_WAIT_S, SIDE_CALL_S, Once, SglangHttp, context_len
from silva.inference.sglang_wire import SENT_PARAMS, attempt_rid, encode_request, read_answer, version_number
from silva.types import Clock, ConfigError, EngineFault, EngineUsage, GenerateRequest, GenerateResult, WeightSource

log = logging.getLogger("silva.engine")

TELL_AGAIN_S = 1.0

NO_WEIGHTS = "new weights cannot be loaded into --engine sglang: that part of Silva is not built yet"


@dataclass(kw_only=True, slots=True, eq=False)
class _Running:
    """One attempt in flight."""

    url: str
    """Its server."""
    rid: str
    """The server's name for it."""
    telling: asyncio.Task[None] | None = None
    """Re-sends its abort until it ends; None while nobody aborts it."""


class SglangEngine:
    """Engine protocol over `POST /generate` of SGLang-shaped servers.

    Log-probs: such a server gives log softmax(logits / T) of each sampled id, taken before top-p and top-k, and at
    temperature 0 (argmax) those at T = 1. That is the contract of `GenerateResult`, as long as the server runs
    without SGLANG_RETURN_ORIGINAL_LOGPROB, which nothing shows over HTTP. The mass that top-p and top-k keep is not
    reported, so requests that use them are refused, and the kept mass is exactly 1. A seed counts only where the server
    was started with --enable-deterministic-inference.

    A session stays with one server (by a hash of its id), whose prefix cache knows it; after a fault or a timeout its
    next attempt goes to the next one. All waits run on the injected clock, apart from the limits of short side calls.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        clock: Clock,
        timeout_s: float,
        fallback_context_len: int,
        ready_wait_s: float = READY_WAIT_S,
    ):
        assert urls, "an HTTP engine needs a server"
        self._urls = [url.rstrip("/") for url in urls]
        self._clock = clock
        self._timeout_s = timeout_s
        self._fallback_context_len = fallback_context_len
        self.max_context_len = 0
        self.version = 0
        """The weight version of the last answer."""
        self.image_support: ImageSupport = "placed"  # a server finds images by the places that the template gives them
        self._nonce = uuid.uuid4().hex[:8]
        self._http = SglangHttp(clock=clock, flag="--engine-url", ready_wait_s=min(ready_wait_s, timeout_s))
        self._running: dict[str, _Running] = {}
        self._num_moves: Counter[str] = Counter()
        self._side_calls: set[asyncio.Task[None]] = set()
        self._counters: Counter[str] = Counter()

    async def start(self) -> None:
        """Wait until every server answers. Raises ConfigError: one does not, or they do not fit together."""
        self._http.open()
        try:
            servers = [await self._http.look(url) for url in self._urls]
            self._agree([model for model, _ in servers])
            limits = [context_len(server, self._fallback_context_len) for _, server in servers]
            self.max_context_len = min(limits)
            if self.max_context_len < 2:
                url = self._urls[limits.index(self.max_context_len)]
                raise ConfigError(f"--engine-url {url} has room for {self.max_context_len} tokens only")
        except BaseException:
            await self._http.close()
            raise
        log.info("engine: %s, context %d tokens", ", ".join(self._urls), self.max_context_len)

    async def close(self) -> None:
        """The last aborts are still sent (each has a timeout)."""
        for running in self._running.values():
            if running.telling is not None:
                running.telling.cancel()
        await asyncio.gather(*self._side_calls, return_exceptions=True)
        await self._http.close()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        sampling = request.sampling
        if sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k != -1):
            raise EngineFault("--engine sglang cannot sample with top-p or top-k: no server tells the mass they keep")
        running = _Running(url=self._url_of(request.session_id), rid=attempt_rid(self._nonce, request))
        self._running[request.request_id] = running
        started_s = self._clock.monotonic_s()
        try:
            body = await self._http.call("POST", running.url, "/generate", Once(await _encode(request, running.rid)))
            result = self._read(request, running, body)
        except EngineFault:
            self._move_on(request.session_id)
            raise
        except asyncio.CancelledError:
            if self._clock.monotonic_s() - started_s >= self._timeout_s:
                self._move_on(request.session_id)
            self._begin(self._tell(running))
            raise
        finally:
            if running.telling is not None:
                running.telling.cancel()
            if self._running.get(request.request_id) is running:
                del self._running[request.request_id]
        if result.version_spans:
            self.version = result.version_spans[-1].version
        return result

    async def abort(self, request_id: str) -> None:
        """Returns at once. Aborts are re-sent until the answer arrives: a server drops one for an unknown rid."""
        running = self._running.get(request_id)
        if running is not None and running.telling is None:
            running.telling = self._begin(self._tell_on(running))

    async def load_weights(self, source: WeightSource) -> None:
        raise ConfigError(NO_WEIGHTS)

    async def close_session(self, session_id: str) -> None:
        """A server evicts by itself; only the session's choice of server is forgotten."""
        self._num_moves.pop(session_id, None)

    def usage(self) -> EngineUsage:
        """`engine_moved` counts sessions sent to another server, `abort_untold` aborts that reached none."""
        return EngineUsage(num_running=len(self._running), counters=dict(self._counters))

    def _read(self, request: GenerateRequest, running: _Running, body: bytes) -> GenerateResult:
        try:
            return read_answer(request, running.rid, body, version=self.version)
        except EngineFault as fault:
            raise EngineFault(f"{running.url}/generate: {fault}") from fault

    def _url_of(self, session_id: str) -> str:
        digest = hashlib.blake2b(session_id.encode("utf-8", "replace"), digest_size=8).digest()
        return self._urls[(int.from_bytes(digest, "big") + self._num_moves[session_id]) % len(self._urls)]

    def _move_on(self, session_id: str) -> None:
        if len(self._urls) > 1:
            self._num_moves[session_id] += 1
            self._counters["engine_moved"] += 1

    def _begin(self, call: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(call)
        self._side_calls.add(task)
        task.add_done_callback(self._side_calls.discard)
        return task

    async def _tell_on(self, running: _Running) -> None:
        while True:
            await self._tell(running)
            await self._clock.sleep(TELL_AGAIN_S)

    async def _tell(self, running: _Running) -> None:
        body = Once(msgspec.json.encode({"rid": running.rid, "abort_all": False}))
        try:
            async with asyncio.timeout(SIDE_CALL_S):
                await self._http.call("POST", running.url, "/abort_request", body)
        except (EngineFault, TimeoutError) as fault:
            self._counters["abort_untold"] += 1
            log.warning("the abort of %s did not reach %s: %s", running.rid, running.url, fault)

    def _agree(self, models: list[dict[str, object]]) -> None:
        """All servers must serve the same weights, under no sampling rules of their own."""
        versions: list[int] = []
        for url, model in zip(self._urls, models, strict=True):
            if model.get("is_generation") is False:
                raise ConfigError(f"--engine-url {url} serves {model.get('model_path')}, which generates no text")
            extra = model.get("preferred_sampling_params")
            if isinstance(extra, dict) and not SENT_PARAMS.issuperset(extra):
                names = ", ".join(sorted(set(extra) - SENT_PARAMS))
                raise ConfigError(
                    f"--engine-url {url} was started with preferred sampling parameters that Silva does not set "
                    f"({names}): its log-probs would not be those of the model alone. Start it without them"
                )
            try:
                versions.append(version_number(model.get("weight_version")))
            except EngineFault as fault:
                raise ConfigError(f"--engine-url {url}: {fault}") from None
        for name, values in (("model", [m.get("model_path") for m in models]), ("weight version", versions)):
            other = next((at for at, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                raise ConfigError(
                    f"the servers of --engine-url do not serve the same {name}: {self._urls[0]} has {values[0]!r}, "
                    f"{self._urls[other]} has {values[other]!r}"
                )
        self.version = versions[0]


async def _encode(request: GenerateRequest, rid: str) -> bytes:
    """The body of an attempt. Images are read and encoded off the event loop."""
    if not request.media:
        return encode_request(request, rid)
    return await asyncio.to_thread(encode_request, request, rid)
