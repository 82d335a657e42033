"""The few pieces of HTTP that the gateway needs, straight on the ASGI interface."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from silva.types import JsonObject

Event = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]

DELIVERY = "silva.delivery"
"""Key of the Delivery in the state of a request's scope."""
MAX_BODY_BYTES = 64 << 20
MAX_DRAINED_BYTES = 1 << 30

JSON_TYPE: Header = (b"content-type", b"application/json")
STREAM_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
)


@dataclass(slots=True, eq=False)
class Delivery:
    """What becomes of one answer on its connection."""

    abort: Callable[[], None] = lambda: None
    """Cuts the connection."""
    resume: Callable[[], None] = lambda: None
    """Reads the connection again. A loss shows only on a connection that is read."""
    lost: bool = False
    """True where the connection went before the answer was complete."""
    reset: bool = False
    """True where the peer broke it off after the answer and before any other request: it never read the answer."""
    _gone: asyncio.Future[None] | None = field(default=None, init=False)

    def gone(self) -> asyncio.Future[None]:
        """Done when the connection is lost. Call it only after the body was read."""
        self.resume()
        if self._gone is None:
            self._gone = asyncio.get_running_loop().create_future()
            if self.lost or self.reset:
                self._gone.set_result(None)
        return self._gone

    def lose(self, *, complete: bool, reset: bool) -> None:
        """Note that the connection went. `complete`: the whole answer was written."""
        self.lost, self.reset = not complete, reset
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)


def delivery_of(scope: Scope) -> Delivery:
    """The Delivery of a request's answer, kept by the server."""
    return scope["state"][DELIVERY]


class BodyTooLarge(Exception):
    """The body is longer than the limit. Nothing of it was kept."""


class ClientGone(Exception):
    """The connection was lost before the body was complete."""


def header(scope: Scope, name: bytes) -> str | None:
    """The first value of a header (name in lower case), as text."""
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1").strip()
    return None


def credential(scope: Scope) -> str | None:
    """The session credential: a bearer token, else `x-api-key`."""
    scheme, _, token = (header(scope, b"authorization") or "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return header(scope, b"x-api-key") or None


async def read_request_body(scope: Scope, receive: Receive, *, limit: int = MAX_BODY_BYTES) -> bytes:
    """The whole body, at most `limit` bytes. Raises BodyTooLarge or ClientGone.

    A body that is too long is read to its end and thrown away, because a client that is still writing would not see
    the answer. A client that waits for `100 Continue` is refused before it writes.
    """
    announced = header(scope, b"content-length") or ""
    too_large = announced.isdecimal() and len(announced) < 20 and int(announced) > limit
    if too_large and (header(scope, b"expect") or "").lower() == "100-continue":
        raise BodyTooLarge
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise ClientGone
        chunk, more = event.get("body", b""), event.get("more_body", False)
        size += len(chunk)
        too_large = too_large or size > limit
        if too_large:
            chunks.clear()
            if size > MAX_DRAINED_BYTES:
                raise BodyTooLarge
        elif chunk:
            chunks.append(chunk)
    if too_large:
        raise BodyTooLarge
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def send_start(send: Send, status: int, headers: Iterable[Header]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})


async def send_body(send: Send, body: bytes, *, more: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def send_json(send: Send, status: int, document: JsonObject, headers: Iterable[Header] = ()) -> None:
    """A whole JSON answer."""
    body = msgspec.json.encode(document)
    length = (b"content-length", str(len(body)).encode())
    await send_start(send, status, (JSON_TYPE, length, *headers))
    await send_body(send, body)
