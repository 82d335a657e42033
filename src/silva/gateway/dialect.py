"""What the gateway needs of a model protocol: one `Dialect` class each. Nothing else branches on the protocol."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from silva.types import ApiError, JsonObject, TurnOptions, TurnReply
from silva.wire import ApiFormat, HistoryCache, ModelRequest

RETRY_HEADER = (b"x-should-retry", b"false")


class Dialect(ApiFormat, Protocol):
    """A protocol's form as JSON, and what it adds over HTTP: header names and the frames of streams."""

    @property
    def request_id_headers(self) -> tuple[bytes, ...]:
        """Names of the response headers that carry the id of the request."""
        ...

    @property
    def connected_frame(self) -> bytes:
        """Sent as soon as a stream opens."""
        ...

    @property
    def heartbeat_frame(self) -> bytes:
        """Sent while a stream waits."""
        ...

    def data_heartbeat(self, options: TurnOptions, request_id: str, created_s: float, num_early: int) -> bytes:
        """A frame that clients count as data, while the turn is made; `num_early` such frames came before it."""
        ...

    def stream(self, options: TurnOptions, reply: TurnReply, num_early: int) -> bytes:
        """Every event of a finished stream after `num_early` data heartbeats, up to the terminal one."""
        ...

    def stream_error(self, error: ApiError, num_early: int) -> bytes:
        """The frames that end a stream that failed after `num_early` data heartbeats."""
        ...


@runtime_checkable
class CountingDialect(Dialect, Protocol):
    """A protocol whose clients can also ask how many tokens a request takes."""

    @property
    def count_route(self) -> str:
        """Resource path, without any prefix."""
        ...

    def parse_count(self, body: bytes, history: HistoryCache) -> ModelRequest:
        """As `parse`, for the body of such a question."""
        ...

    def count(self, num_tokens: int) -> JsonObject:
        """The document of the answer."""
        ...
