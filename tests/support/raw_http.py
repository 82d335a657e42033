"""A bare HTTP/1.1 client on asyncio streams: cheap, and able to do what well-behaved clients never do."""

from __future__ import annotations

import asyncio
import json
from typing import Any


class RawClient:
    """One keep-alive connection."""

    def __init__(self, port: int, session_id: str):
        self._port = port
        self._session_id = session_id
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, body: Any, path: str = "/v1/chat/completions", **more: str) -> None:
        """One request. `more` are headers, `_` for `-`."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST /agentic_api{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self._session_id}\r\n"
        head += "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in more.items())
        self._streams[1].write(head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer."""
        assert self._streams is not None
        lines = (await self._streams[0].readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
        return int(lines[0].split()[1]), headers

    async def chunk(self) -> bytes:
        """The next chunk of a chunked answer; b"" is the last one."""
        assert self._streams is not None
        size = int(await self._streams[0].readuntil(b"\r\n"), 16)
        return (await self._streams[0].readexactly(size + 2))[:-2]

    async def post(self, body: Any) -> tuple[int, bytes]:
        """A whole exchange: status and body."""
        await self.send(body)
        status, headers = await self.head()
        assert self._streams is not None
        if "content-length" in headers:
            return status, await self._streams[0].readexactly(int(headers["content-length"]))
        whole = b""
        while chunk := await self.chunk():
            whole += chunk
        return status, whole

    async def rest(self) -> bytes:
        """What still comes until the server closes the connection."""
        assert self._streams is not None
        return await self._streams[0].read()

    def abort(self) -> None:
        """Lose the connection at once."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None
