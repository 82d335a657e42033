"""What a model protocol must do for the gateway: one `Dialect` class each; nothing else branches on protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from silva.turns.placing import MessagesBetween
from silva.types.generation import FinishReason
from silva.types.messages import Conversation, Message
from silva.types.rollout import TokenUsage
from silva.wire.history import HistoryCache
from silva.wire.images import RequestImages

RETRY_HEADER = (b"x-should-retry", b"false")


def _message_path(index: int) -> str:
    return f"messages[{index}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnOptions:
    """What a request asks for besides its history. It outlives the body, so it holds none of it."""

    model: str = "model"
    stream: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    ignored_fields: tuple[str, ...] = ()
    object_calls: bool = False
    """Calls can only be told with an object of arguments; others are told as text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRequest:
    """A request in canonical form: one digest a message; the messages themselves are formed where asked for."""

    options: TurnOptions
    conversation: Conversation
    digests: list[bytes]
    messages_between: MessagesBetween
    path_of: Callable[[int], str] = _message_path
    """Where in the body a canonical message stands."""
    images: RequestImages = field(default_factory=RequestImages)
    """Those of the messages that were formed so far."""

    def message_at(self, index: int) -> Message:
        """One message of the history."""
        return self.messages_between(index, index + 1)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """One sampled token as shown to the client. `data` is its UTF-8, None where it is only a part of a character."""

    text: str
    logprob: float
    data: bytes | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnReply:
    """A committed turn, ready to be told. `message` is the new part of the assistant's turn.

    `matched_stop` is the stop string that ended it, where one did.
    """

    request_id: str
    created_s: float
    message: Message
    finish: FinishReason
    usage: TokenUsage
    matched_stop: str | None = None
    logprobs: Sequence[TokenLogprob] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiError:
    """An answer that is no turn. `code` is a stable word, `field` the path of the offending value.

    `request_id` says which request it was (empty: one that was not recorded). The rest is told of a stream that failed.
    """

    status: int
    code: str
    message: str
    field: str | None = None
    request_id: str = ""
    model: str = "model"
    created_s: float = 0.0


class Dialect(Protocol):
    """Routes, request form, reply form, stream frames and error form of one protocol."""

    @property
    def name(self) -> str:
        """Stable word of the ledger: chat, responses or messages."""
        ...

    @property
    def routes(self) -> tuple[str, ...]:
        """Resource paths, without any prefix."""
        ...

    @property
    def request_id_headers(self) -> tuple[bytes, ...]:
        """Names of the response headers that tell the id of the request."""
        ...

    @property
    def connected_frame(self) -> bytes:
        """Sent as soon as a stream opens."""
        ...

    @property
    def heartbeat_frame(self) -> bytes:
        """Sent while a stream waits."""
        ...

    def parse(self, body: bytes, history: HistoryCache) -> ModelRequest:
        """Validate a body. Raises RequestError with the path of the offending field."""
        ...

    def render(self, options: TurnOptions, reply: TurnReply) -> bytes:
        """The JSON answer."""
        ...

    def data_heartbeat(self, options: TurnOptions, request_id: str, created_s: float, num_early: int) -> bytes:
        """A frame that clients count as data, while the turn is made; `num_early` such frames came before it."""
        ...

    def stream(self, options: TurnOptions, reply: TurnReply, num_early: int) -> bytes:
        """Every event of a finished stream behind `num_early` data heartbeats, the terminal one included."""
        ...

    def error(self, error: ApiError) -> bytes:
        """The JSON body of an error."""
        ...

    def stream_error(self, error: ApiError, num_early: int) -> bytes:
        """The frames that end a stream which failed behind `num_early` data heartbeats."""
        ...


@runtime_checkable
class CountingDialect(Dialect, Protocol):
    """A protocol whose clients can also ask how many tokens a request takes."""

    @property
    def count_routes(self) -> tuple[str, ...]:
        """Resource paths, without any prefix."""
        ...

    def parse_count(self, body: bytes, history: HistoryCache) -> ModelRequest:
        """As `parse`, for the body of such a question."""
        ...

    def render_count(self, num_tokens: int) -> bytes:
        """The JSON answer."""
        ...
