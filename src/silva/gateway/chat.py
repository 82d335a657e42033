"""Chat Completions over HTTP."""

from __future__ import annotations

from silva.gateway.sse import DONE, data_frame
from silva.types import ApiError, TurnOptions, TurnReply
from silva.wire import ChatFormat


class ChatDialect(ChatFormat):
    """Chat Completions, with the frames of its streams."""

    request_id_headers = (b"x-request-id",)
    connected_frame = b": connected\n\n"
    heartbeat_frame = b": waiting\n\n"

    def data_heartbeat(self, options: TurnOptions, request_id: str, created_s: float, num_early: int) -> bytes:
        return data_frame(self.empty_chunk(options, request_id, created_s))

    def stream(self, options: TurnOptions, reply: TurnReply, num_early: int) -> bytes:
        return data_frame(self.chunk(options, reply)) + DONE

    def stream_error(self, error: ApiError, num_early: int) -> bytes:
        return data_frame(self.error(error)) + DONE
