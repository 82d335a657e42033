"""Plain calls to servers that speak SGLang's native API, for the engine and the scorer alike."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import aiohttp
import msgspec
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from silva.types import Clock, ConfigError, EngineFault

log = logging.getLogger("silva.engine")

READY_WAIT_S = 60.0
LOOK_AGAIN_S = 0.5
SIDE_CALL_S = 5.0
"""Longest time of a call that is no generation."""
KEEP_ALIVE_S = 3.0
"""Servers close an idle connection after 5 s; one that is let go before cannot be lost under a request."""
MAX_ANSWER_BYTES = 1 << 28
JSON_TYPE = {"content-type": "application/json"}
KEPT_BACK = 7
"""Positions of the context that a server keeps for itself (seen: 2, and 5 more for the prompt)."""


@dataclass(kw_only=True, eq=False)
class SglangHttp:
    """The connections of one user of servers."""

    clock: Clock
    flag: str
    """The option that names the servers, for messages."""
    ready_wait_s: float
    """Seconds to wait at start for a server that does not answer."""
    _session: aiohttp.ClientSession | None = None
    _addresses: dict[tuple[str, str], URL] = field(default_factory=dict[tuple[str, str], "URL"])

    def open(self) -> None:
        """Needs a running event loop."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(self, method: str, url: str, path: str, body: Once | None = None) -> bytes:
        """The body of an answer with status 200. Raises EngineFault for every other end, `Refused` for a status."""
        assert self._session is not None, "the connections were not opened"
        address = self._addresses.get((url, path))
        if address is None:
            address = self._addresses[url, path] = URL(url + path)
        headers = None if body is None else JSON_TYPE
        try:
            async with self._session.request(
                method, address, data=body, headers=headers, allow_redirects=False
            ) as answer:
                data = await _read_body(answer)
        except TimeoutError as error:
            raise EngineFault(f"{url}{path}: no connection in time") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineFault(f"{url}{path}: {str(error) or type(error).__name__}") from error
        if answer.status != 200:
            said = data[:300].decode("utf-8", "replace").strip()
            raise Refused(answer.status, f"{url}{path} answered status {answer.status}" + (f": {said}" if said else ""))
        return data

    async def look(self, url: str) -> tuple[dict[str, object], dict[str, object]]:
        """A server's description of its model and of itself, once it answers. (/health fails on a paused one.)"""
        until_s = self.clock.monotonic_s() + self.ready_wait_s
        told = False
        while True:
            try:
                model = await self._info(url, "/model_info", "/get_model_info")
                break
            except Refused as refused:
                if refused.status < 500:
                    raise ConfigError(f"{self.flag} {url} is no SGLang server that Silva can use: {refused}") from None
                fault: EngineFault = refused
            except EngineFault as error:
                fault = error
            if self.clock.monotonic_s() >= until_s:
                raise ConfigError(
                    f"{self.flag} {url}: no server answered within {self.ready_wait_s:g} s ({fault}). Is it running, "
                    "and is the address right?"
                )
            if not told:
                log.warning("waiting up to %g s for the server at %s: %s", self.ready_wait_s, url, fault)
                told = True
            await self.clock.sleep(LOOK_AGAIN_S)
        try:
            return model, await self._info(url, "/server_info", "/get_server_info")
        except EngineFault:
            return model, {}

    async def _info(self, url: str, path: str, old_path: str) -> dict[str, object]:
        try:
            async with asyncio.timeout(SIDE_CALL_S):
                try:
                    body = await self.call("GET", url, path)
                except Refused as refused:
                    if refused.status != 404:
                        raise
                    body = await self.call("GET", url, old_path)
        except TimeoutError:
            raise EngineFault(f"{url}{path}: no answer within {SIDE_CALL_S:g} s") from None
        try:
            found = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise Refused(200, f"{url}{path} answered something that is no JSON object")
        return found


class Once(aiohttp.BytesPayload):
    """The body of a request, freed when it is written: the wait for the answer is long, and nothing re-sends it."""

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        data, self._value = self._value, b""
        await writer.write(data if content_length is None else data[:content_length])


class Refused(EngineFault):
    """An answer with another status than 200."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def context_len(server: dict[str, object], fallback: int) -> int:
    """Most tokens, prompt and response together, that a server takes; `fallback` where it does not report any."""

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
