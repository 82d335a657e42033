"""The protocols as JSON, by route: what HTTP, recordings and clients in this process read and write alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from silva.types import ApiError, JsonObject, TurnOptions, TurnReply
from silva.wire.chat_format import ChatFormat
from silva.wire.history import HistoryCache
from silva.wire.messages_format import MessagesFormat
from silva.wire.model_request import ModelRequest
from silva.wire.responses_format import ResponsesFormat


class ApiFormat(Protocol):
    """Request form, reply form and error form of one protocol."""

    @property
    def name(self) -> str:
        """Stable word of the ledger: chat, responses or messages."""
        ...

    @property
    def route(self) -> str:
        """Resource path, without any prefix."""
        ...

    def parse(self, body: bytes, history: HistoryCache) -> ModelRequest:
        """Validate a body. Raises RequestError with the path of the offending field."""
        ...

    def reply(self, options: TurnOptions, reply: TurnReply) -> JsonObject:
        """The document of a committed turn; msgspec encodes it."""
        ...

    def error(self, error: ApiError) -> JsonObject:
        """The document of an error."""
        ...


_ALL: tuple[ApiFormat, ...] = (ChatFormat(), ResponsesFormat(), MessagesFormat())
FORMATS: Mapping[str, ApiFormat] = {form.route: form for form in _ALL}
