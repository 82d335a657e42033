"""Records the model traffic of a gateway: one JSON object per line, as `silva check --replay` reads it."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from silva.gateway.http import AsgiApp, Event, Receive, Scope, Send, credential, delivery_of, header
from silva.types import ConfigError, JsonObject
from silva.wire import KEPT_HEADERS, route_of

MAX_RECORDED_BYTES = 64 << 20
log = logging.getLogger("silva.gateway")


class Recorder:
    """ASGI callable around another one. Requests to other routes than model routes are not recorded.

    A line is written when the answer is complete; an exchange that broke off leaves none. Lines contain the session's
    id, which is its credential, so only its owner can read the file.
    """

    def __init__(self, app: AsgiApp, path: Path):
        """Raises ConfigError where the file cannot be opened."""
        self._app = app
        try:
            path.touch(mode=0o600)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"--record {path} cannot be written: {error.strerror or error}") from error

    def close(self) -> None:
        self._file.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or route_of(scope["path"]) is None:
            await self._app(scope, receive, send)
            return
        sent, answered = bytearray(), bytearray()
        status = 0

        async def read() -> Event:
            event = await receive()
            if event["type"] == "http.request" and len(sent) <= MAX_RECORDED_BYTES:
                sent.extend(event.get("body", b""))
            return event

        async def write(event: Event) -> None:
            nonlocal status
            await send(event)
            if event["type"] == "http.response.start":
                status = event["status"]
            elif event["type"] == "http.response.body":
                answered.extend(event.get("body", b""))
                if not event.get("more_body") and not delivery_of(scope).lost:
                    self._write(scope, bytes(sent), status, bytes(answered))

        await self._app(scope, read, write)

    def _write(self, scope: Scope, sent: bytes, status: int, answered: bytes) -> None:
        line: JsonObject = {
            "session": credential(scope) or "none",
            "method": "POST",
            "path": scope["path"],
            "headers": {name: value for name in KEPT_HEADERS if (value := header(scope, name.encode()))},
            "body": _json_or_text(sent),
            "status": status,
        }
        if status == 200:
            line["response"] = _json_or_text(answered)
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            log.error("--record: an exchange is not recorded, since the file cannot be written: %s", error)


def _json_or_text(data: bytes) -> msgspec.Raw | str:
    """A JSON object as it is, on one line; anything else as text."""
    try:
        msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        return msgspec.Raw(msgspec.json.format(data, indent=-1))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return data.decode("utf-8", "replace")
