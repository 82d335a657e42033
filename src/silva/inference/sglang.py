"""An engine behind HTTP: one or more servers that speak SGLang's native API."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from silva.inference.engine import ImageSupport
from silva.inference.sglang_wire import SENT_PARAMS, attempt_rid, encode_request, read_answer, version_number
from silva.types.clock import Clock
from silva.types.errors import ConfigError, EngineFault
from silva.types.generation import EngineUsage, GenerateRequest, GenerateResult

log = logging.getLogger("silva.engine")

READY_WAIT_S = 60.0
LOOK_AGAIN_S = 0.5
TELL_AGAIN_S = 1.0
SIDE_CALL_S = 5.0
"""Longest time of a call that is no generation."""
KEEP_ALIVE_S = 3.0
"""Servers close an idle connection after 5 s; one that is let go before cannot be lost under a request."""
MAX_ANSWER_BYTES = 1 << 28
JSON_TYPE = {"content-type": "application/json"}
KEPT_BACK = 7
"""Positions of the context that a server keeps for itself (seen: 2, and 5 more for the prompt)."""

NO_WEIGHTS = "new weights cannot be loaded into --engine sglang: that part of Silva is not built yet"


@dataclass(kw_only=True, slots=True, eq=False)
class _Running:
    """One attempt on its way. `telling` repeats its abort until it ends."""

    url: str
    rid: str
    telling: asyncio.Task[None] | None = None


class SglangEngine:
    """Engine protocol over `POST /generate` of SGLang-shaped servers.

    Log-probs: such a server gives log softmax(logits / T) of each sampled id, taken before top-p and top-k, and at
    temperature 0 (argmax) those at T = 1. That is the contract of `GenerateResult`, as long as the server runs
    without SGLANG_RETURN_ORIGINAL_LOGPROB, which nothing shows over HTTP. The mass that top-p and top-k keep is not
    told, so requests that use them are refused, and the kept mass is exactly 1. A seed counts only where the server
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
        self._ready_wait_s = min(ready_wait_s, timeout_s)
        self._fallback_context_len = fallback_context_len
        self._max_context_len = 0
        self._version = 0
        self._nonce = uuid.uuid4().hex[:8]
        self._http: aiohttp.ClientSession | None = None
        self._running: dict[str, _Running] = {}
        self._num_moves: Counter[str] = Counter()
        self._addresses: dict[tuple[str, str], URL] = {}
        self._side_calls: set[asyncio.Task[None]] = set()
        self._counters: Counter[str] = Counter()

    @property
    def version(self) -> int:
        """What the last answer said."""
        return self._version

    @property
    def max_context_len(self) -> int:
        return self._max_context_len

    @property
    def image_support(self) -> ImageSupport:
        """A server finds images by the places that the chat template gives them."""
        return "placed"

    async def start(self) -> None:
        """Wait until every server answers. Raises ConfigError: one does not, or they do not fit together."""
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        )
        try:
            servers = [await self._look(url) for url in self._urls]
            self._agree([model for model, _ in servers])
            limits = [_context_len(server, self._fallback_context_len) for _, server in servers]
            self._max_context_len = min(limits)
            if self._max_context_len < 2:
                url = self._urls[limits.index(self._max_context_len)]
                raise ConfigError(f"--engine-url {url} has room for {self._max_context_len} tokens only")
        except BaseException:
            await self._http.close()
            raise
        log.info("engine: %s, context %d tokens", ", ".join(self._urls), self._max_context_len)

    async def close(self) -> None:
        """Aborts that were told last are let through (each is bounded)."""
        for running in self._running.values():
            if running.telling is not None:
                running.telling.cancel()
        await asyncio.gather(*self._side_calls, return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        sampling = request.sampling
        if sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k != -1):
            raise EngineFault("--engine sglang cannot sample with top-p or top-k: no server tells the mass they keep")
        running = _Running(url=self._url_of(request.session_id), rid=attempt_rid(self._nonce, request))
        self._running[request.request_id] = running
        started_s = self._clock.monotonic_s()
        try:
            body = await self._call("POST", running.url, "/generate", _Once(await _encode(request, running.rid)))
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
            self._version = result.version_spans[-1].version
        return result

    async def abort(self, request_id: str) -> None:
        """Returns at once. A server ignores an rid that it does not know yet, so it is told until the answer comes."""
        running = self._running.get(request_id)
        if running is not None and running.telling is None:
            running.telling = self._begin(self._tell_on(running))

    async def load_weights(self, weights: Mapping[str, Any], *, version: int) -> None:
        raise ConfigError(NO_WEIGHTS)

    async def close_session(self, session_id: str) -> None:
        """A server forgets by itself; only the session's place is dropped."""
        self._num_moves.pop(session_id, None)

    def usage(self) -> EngineUsage:
        """`engine_moved` counts sessions sent to another server, `abort_untold` aborts that reached none."""
        return EngineUsage(num_running=len(self._running), counters=dict(self._counters))

    def _read(self, request: GenerateRequest, running: _Running, body: bytes) -> GenerateResult:
        try:
            return read_answer(request, running.rid, body, version=self._version)
        except EngineFault as fault:
            raise EngineFault(f"{running.url}/generate: {fault}") from fault

    def _url_of(self, session_id: str) -> str:
        digest = hashlib.blake2b(session_id.encode("utf-8", "replace"), digest_size=8).digest()
        return self._urls[(int.from_bytes(digest, "big") + self._num_moves[session_id]) % len(self._urls)]

    def _move_on(self, session_id: str) -> None:
        if len(self._urls) > 1:
            self._num_moves[session_id] += 1
            self._counters["engine_moved"] += 1

    def _begin(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(call)
        self._side_calls.add(task)
        task.add_done_callback(self._side_calls.discard)
        return task

    async def _tell_on(self, running: _Running) -> None:
        while True:
            await self._tell(running)
            await self._clock.sleep(TELL_AGAIN_S)

    async def _tell(self, running: _Running) -> None:
        body = _Once(msgspec.json.encode({"rid": running.rid, "abort_all": False}))
        try:
            async with asyncio.timeout(SIDE_CALL_S):
                await self._call("POST", running.url, "/abort_request", body)
        except (EngineFault, TimeoutError) as fault:
            self._counters["abort_untold"] += 1
            log.warning("the abort of %s did not reach %s: %s", running.rid, running.url, fault)

    async def _call(self, method: str, url: str, path: str, body: _Once | None = None) -> bytes:
        """The body of an answer with status 200. Raises EngineFault for every other end, `_Refused` for a status."""
        assert self._http is not None, "the engine was not started"
        address = self._addresses.get((url, path))
        if address is None:
            address = self._addresses[url, path] = URL(url + path)
        headers = None if body is None else JSON_TYPE
        try:
            async with self._http.request(method, address, data=body, headers=headers, allow_redirects=False) as answer:
                data = await _read_body(answer)
        except TimeoutError as error:
            raise EngineFault(f"{url}{path}: no connection in time") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineFault(f"{url}{path}: {str(error) or type(error).__name__}") from error
        if answer.status != 200:
            said = data[:300].decode("utf-8", "replace").strip()
            raise _Refused(
                answer.status, f"{url}{path} answered status {answer.status}" + (f": {said}" if said else "")
            )
        return data

    async def _look(self, url: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a server says of its model and of itself, once it answers. /health is no sign: a paused one fails."""
        until_s = self._clock.monotonic_s() + self._ready_wait_s
        told = False
        while True:
            try:
                model = await self._info(url, "/model_info", "/get_model_info")
                break
            except _Refused as refused:
                if refused.status < 500:
                    raise ConfigError(f"--engine-url {url} is no SGLang server that Silva can use: {refused}") from None
                fault: EngineFault = refused
            except EngineFault as error:
                fault = error
            if self._clock.monotonic_s() >= until_s:
                raise ConfigError(
                    f"--engine-url {url}: no server answered within {self._ready_wait_s:g} s ({fault}). Is it running, "
                    "and is the address right?"
                )
            if not told:
                log.warning("waiting up to %g s for the engine at %s: %s", self._ready_wait_s, url, fault)
                told = True
            await self._clock.sleep(LOOK_AGAIN_S)
        try:
            return model, await self._info(url, "/server_info", "/get_server_info")
        except EngineFault:
            return model, {}

    async def _info(self, url: str, path: str, old_path: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(SIDE_CALL_S):
                try:
                    body = await self._call("GET", url, path)
                except _Refused as refused:
                    if refused.status != 404:
                        raise
                    body = await self._call("GET", url, old_path)
        except TimeoutError:
            raise EngineFault(f"{url}{path}: no answer within {SIDE_CALL_S:g} s") from None
        try:
            found = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise _Refused(200, f"{url}{path} answered something that is no JSON object")
        return found

    def _agree(self, models: list[dict[str, Any]]) -> None:
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
        self._version = versions[0]


class _Once(aiohttp.BytesPayload):
    """The body of a request, let go when it is written: the wait for the answer is long, and nothing sends it again."""

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        data, self._value = self._value, b""
        await writer.write(data if content_length is None else data[:content_length])


class _Refused(EngineFault):
    """An answer with another status than 200."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def _context_len(server: dict[str, Any], fallback: int) -> int:
    """Most tokens, prompt and response together, that a server takes; `fallback` stands in for a silent one."""

    def number(name: str) -> int | None:
        value = server.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    longest = number("max_req_input_len")
    if longest is not None:
        return longest
    context, pool = number("context_length") or fallback, number("max_total_num_tokens")
    return (context if pool is None else min(context, pool)) - KEPT_BACK


async def _read_body(answer: aiohttp.ClientResponse) -> bytes:
    if (answer.content_length or 0) > MAX_ANSWER_BYTES:
        raise ValueError(f"the answer is announced with {answer.content_length} bytes")
    chunks: list[bytes] = []
    size = 0
    async for chunk in answer.content.iter_any():
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            raise ValueError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def _encode(request: GenerateRequest, rid: str) -> bytes:
    """The body of an attempt. Images are read and encoded off the event loop."""
    if not request.media:
        return encode_request(request, rid)
    return await asyncio.to_thread(encode_request, request, rid)
