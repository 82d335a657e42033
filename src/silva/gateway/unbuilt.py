"""Protocols that are announced but not built: their routes answer with a clear error in the protocol's own shape."""

from __future__ import annotations

import msgspec

from silva.gateway.dialect import ApiError, ModelRequest, TurnOptions, TurnReply
from silva.gateway.history import HistoryCache
from silva.types.errors import RequestError

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "api_error",
}


class _UnbuiltDialect:
    name = ""
    title = ""
    routes: tuple[str, ...] = ()
    connected_frame = b": connected\n\n"
    heartbeat_frame = b": waiting\n\n"

    def parse(self, body: bytes, history: HistoryCache) -> ModelRequest:
        raise RequestError(
            f"the {self.title} API is not built yet; use Chat Completions (POST /v1/chat/completions)", code="not_built"
        )

    def render(self, options: TurnOptions, reply: TurnReply) -> bytes:
        raise AssertionError(f"{self.title} has no turns")

    def stream(self, options: TurnOptions, reply: TurnReply) -> bytes:
        raise AssertionError(f"{self.title} has no turns")

    def error(self, error: ApiError) -> bytes:
        raise NotImplementedError

    def stream_error(self, error: ApiError) -> bytes:
        raise AssertionError(f"{self.title} has no streams")


class ResponsesDialect(_UnbuiltDialect):
    """OpenAI Responses."""

    name = "responses"
    title = "Responses"
    routes = ("responses",)

    def error(self, error: ApiError) -> bytes:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return msgspec.json.encode(
            {"error": {"message": error.message, "type": kind, "param": error.field, "code": error.code}}
        )


class MessagesDialect(_UnbuiltDialect):
    """Anthropic Messages."""

    name = "messages"
    title = "Messages"
    routes = ("messages", "messages/count_tokens")

    def error(self, error: ApiError) -> bytes:
        kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})
