"""uvicorn's HTTP protocol, which here also answers requests that offer to switch to another one."""

from __future__ import annotations

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_NAMES_A_SWITCH = (b"connection", b"http2-settings")


class HttpProtocol(HttpToolsProtocol):
    """Declines an offered switch by going on in HTTP/1.1, as the standard has it (RFC 9110, 7.8).

    Some clients offer HTTP/2 with each first request (Java's does). The parser takes what comes behind such a head for
    the other protocol, so the body would be lost: the head is parsed again without the offer.
    """

    _declines = False

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
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

    def on_headers_complete(self) -> None:
        self._declines = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if not self._declines:
            super().on_headers_complete()

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
