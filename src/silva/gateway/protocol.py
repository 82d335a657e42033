"""uvicorn's HTTP protocol, and what it leaves open: offers to switch protocols, heads without end."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from silva.gateway.http import DELIVERY, Delivery

MAX_HEAD_BYTES = 1 << 20
MAX_QUEUED = 64
"""With this many requests waiting behind the one being answered, the connection is not read."""
_NAMES_A_SWITCH = (b"connection", b"http2-settings")


class _Joining:
    """A transport that joins what is written in one step of the event loop, so that head and body are one packet."""

    def __init__(self, transport: asyncio.Transport):
        self._transport = transport
        self._waiting: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def write(self, data: bytes) -> None:
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting.append(data)

    def flush(self) -> None:
        data, self._waiting = self._waiting, []
        if data and not self._transport.is_closing():
            self._transport.write(data[0] if len(data) == 1 else b"".join(data))

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)


class HttpProtocol(HttpToolsProtocol):
    """Declines an offered switch of protocols by continuing in HTTP/1.1, as RFC 9110, 7.8 allows.

    Some clients (Java's, for one) offer HTTP/2 with every first request. The parser takes everything behind such a head
    for the other protocol and would lose the body, so the head is parsed again without the offer. A head (address and
    headers) of more than MAX_HEAD_BYTES ends its connection, because nothing else bounds its memory. Each request's
    scope carries a Delivery in its state. A client of HTTP/1.0 gets no chunks.
    """

    parser: Any
    _declines = False
    _head_bytes: int | None = None
    """Bytes of a head that is not complete yet; None outside a head."""
    _answered: RequestResponseCycle | None = None
    """The newest request whose answer has begun. Requests sent behind it without waiting may be newer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(cast("asyncio.Transport", _Joining(transport)))

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                self._bound_head(len(data))
                return
            except httptools.HttpParserUpgrade as offer:
                if not self._declines:
                    return
                self._declines = False
                data = self._plain_head() + data[offer.args[0] :]
            except httptools.HttpParserError:
                message = "Invalid HTTP request received."
                self.logger.warning(message)
                self.send_400_response(message)
                return

    def _bound_head(self, num_bytes: int) -> None:
        if self._head_bytes is not None:
            self._head_bytes += num_bytes
            if self._head_bytes > MAX_HEAD_BYTES:
                self._head_bytes = None
                self.send_400_response(f"The head of the request is larger than {MAX_HEAD_BYTES} bytes.")

    def send_400_response(self, msg: str) -> None:
        if self._answered is None or self._answered.response_complete:
            super().send_400_response(msg)
        else:  # broken bytes came behind a request whose answer is half written
            self.transport.close()

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()
        delivery = Delivery(abort=self.transport.abort, resume=self.flow.resume_reading)
        self.scope["state"][DELIVERY] = delivery  # pyright: ignore[reportTypedDictNotRequiredAccess]

    def connection_lost(self, exc: Exception | None) -> None:
        answered = self._answered
        if answered is not None:
            delivery: Delivery = answered.scope["state"][DELIVERY]  # pyright: ignore[reportTypedDictNotRequiredAccess]
            answered.disconnected = not answered.response_complete
            delivery.lose(complete=answered.response_complete, reset=exc is not None and self.scope is answered.scope)
            answered.message_event.set()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        self._declines = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if not self._declines:
            super().on_headers_complete()
            if self.parser.get_http_version() == "1.0":
                _send_plainly(self.cycle)
            if 0 < len(self.pipeline) < MAX_QUEUED:
                self.flow.resume_reading()  # else the loss of the connection would not be seen

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        if not self._declines:
            super().on_message_complete()

    def _plain_head(self) -> bytes:
        start = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = [(name, value) for name, value in self.headers if name not in _NAMES_A_SWITCH]
        tokens = [t.strip().lower() for name, value in self.headers if name == b"connection" for t in value.split(b",")]
        if b"close" in tokens:
            kept.append((b"connection", b"close"))
        return b"\r\n".join([start, *(name + b": " + value for name, value in kept), b"", b""])


def _send_plainly(cycle: RequestResponseCycle) -> None:
    """Let a body of unknown length go out as it is: where it ends, the connection ends (RFC 9112, 6.3)."""
    send, open_ended = cycle.send, False

    async def plain(message: Any) -> None:
        nonlocal open_ended
        if message["type"] == "http.response.start":
            open_ended = all(name != b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = False if open_ended else None
        elif open_ended:
            cycle.expected_content_length = len(message["body"])
        await send(message)

    cycle.send = plain
