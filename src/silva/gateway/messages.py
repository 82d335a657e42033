"""Anthropic Messages over HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from silva.gateway.sse import data_frame
from silva.types import ApiError, JsonObject, TurnOptions, TurnReply
from silva.wire import MessagesFormat

_PING = data_frame({"type": "ping"}, event="ping")


class MessagesDialect(MessagesFormat):
    """Messages, with the frames of its streams."""

    request_id_headers = (b"x-request-id", b"request-id")
    connected_frame = _PING
    heartbeat_frame = _PING

    def data_heartbeat(self, options: TurnOptions, request_id: str, created_s: float, num_early: int) -> bytes:
        return _PING

    def stream(self, options: TurnOptions, reply: TurnReply, num_early: int) -> bytes:
        whole = self.reply(options, reply)
        stop = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        usage = whole["usage"]
        opened = {**whole, "content": [], **dict.fromkeys(stop), "usage": {**usage, "output_tokens": 0}}
        events = [
            _event("message_start", message=opened),
            *_block_events(whole["content"]),
            _event("message_delta", delta=stop, usage=usage),
            _event("message_stop"),
        ]
        return b"".join(events)

    def stream_error(self, error: ApiError, num_early: int) -> bytes:
        return data_frame(self.error(error), event="error")


def _block_events(blocks: Sequence[JsonObject]) -> Sequence[bytes]:
    events: list[bytes] = []
    for index, block in enumerate(blocks):
        if block["type"] == "thinking":
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        elif block["type"] == "text":
            empty = {"type": "text", "text": ""}
            deltas = [{"type": "text_delta", "text": block["text"]}]
        else:
            empty = {**block, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": bytes(block["input"]).decode()}]
        events.append(_event("content_block_start", index=index, content_block=empty))
        events.extend(_event("content_block_delta", index=index, delta=delta) for delta in deltas)
        events.append(_event("content_block_stop", index=index))
    return events


def _event(kind: str, **fields: object) -> bytes:
    return data_frame({"type": kind, **fields}, event=kind)
