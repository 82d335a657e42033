"""OpenAI Responses over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

from silva.gateway.options import ResponsesEvents
from silva.gateway.sse import data_frame
from silva.types import ApiError, JsonObject, TurnOptions, TurnReply
from silva.wire import ResponsesFormat, ResponsesOptions


class ResponsesDialect(ResponsesFormat):
    """Responses, with the events of its streams."""

    request_id_headers = (b"x-request-id",)
    connected_frame = b": connected\n\n"
    heartbeat_frame = b": waiting\n\n"

    def __init__(self, events: ResponsesEvents):
        self._events = events

    def data_heartbeat(self, options: TurnOptions, request_id: str, created_s: float, num_early: int) -> bytes:
        opened = {"response": self.opened(options, request_id, created_s)}
        return _frames([("in_progress" if num_early else "created", opened)], num_early)

    def stream(self, options: TurnOptions, reply: TurnReply, num_early: int) -> bytes:
        whole = self.reply(options, reply)
        events: list[tuple[str, JsonObject]] = []
        if not num_early:
            opened = {**whole, "status": "in_progress", "output": [], "incomplete_details": None, "usage": None}
            events.append(("created", {"response": opened}))
        for index, item in enumerate(whole["output"]):
            events += _item_events(item, index) if self._events == "full" else [_item_done(item, index)]
        events.append((whole["status"], {"response": whole}))
        return _frames(events, num_early)

    def stream_error(self, error: ApiError, num_early: int) -> bytes:
        opened = self.opened(ResponsesOptions(model=error.model), error.request_id, error.created_s)
        failure = {"code": error.code, "message": error.message}
        failed = {**opened, "status": "failed", "error": failure}
        events: list[tuple[str, JsonObject]] = [] if num_early else [("created", {"response": opened})]
        return _frames([*events, ("failed", {"response": failed})], num_early)


def _item_events(item: JsonObject, index: int) -> Iterator[tuple[str, JsonObject]]:
    """What a client would have seen of an item while it grew."""
    place = {"item_id": item["id"], "output_index": index}
    opened = {**item, "status": "in_progress"} if "status" in item else dict(item)
    if item["type"] == "reasoning":
        (part,) = item["summary"]
        at, start = {**place, "summary_index": 0}, {**part, "text": ""}
        opened["summary"] = []
        grown = [
            ("reasoning_summary_part.added", {**at, "part": start}),
            ("reasoning_summary_text.delta", {**at, "delta": part["text"]}),
            ("reasoning_summary_text.done", {**at, "text": part["text"]}),
            ("reasoning_summary_part.done", {**at, "part": part}),
        ]
    elif item["type"] == "message":
        (part,) = item["content"]
        at, start = {**place, "content_index": 0}, {**part, "text": ""}
        opened["content"] = []
        grown = [
            ("content_part.added", {**at, "part": start}),
            ("output_text.delta", {**at, "delta": part["text"], "logprobs": []}),
            ("output_text.done", {**at, "text": part["text"], "logprobs": []}),
            ("content_part.done", {**at, "part": part}),
        ]
    else:
        name, arguments = item["name"], item["arguments"]
        opened["arguments"] = ""
        grown = [
            ("function_call_arguments.delta", {**place, "delta": arguments}),
            ("function_call_arguments.done", {**place, "name": name, "arguments": arguments}),
        ]
    yield "output_item.added", {"output_index": index, "item": opened}
    yield from grown
    yield _item_done(item, index)


def _item_done(item: JsonObject, index: int) -> tuple[str, JsonObject]:
    return "output_item.done", {"output_index": index, "item": item}


def _frames(events: list[tuple[str, JsonObject]], first: int) -> bytes:
    """Events with rising numbers, from `first` on."""
    frames: list[bytes] = []
    for number, (kind, fields) in enumerate(events, start=first):
        name = "response." + kind
        frames.append(data_frame({"type": name, "sequence_number": number, **fields}, name))
    return b"".join(frames)
