"""The OpenAI Responses protocol."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from silva.gateway.sse import data_frame
from silva.turns.model_request import ModelRequest
from silva.types.messages import JsonObject, Message
from silva.types.rollout import TokenUsage
from silva.types.turn import ApiError, TurnOptions, TurnReply
from silva.wire.fields import (
    ignored_names,
    openai_error,
    read_conversation,
    read_limit,
    read_model,
    read_stream,
)
from silva.wire.history import HistoryCache
from silva.wire.json_in import RawObject, read_body, read_value
from silva.wire.opaque import sealed
from silva.wire.responses_input import InputHistory

ResponsesEvents = Literal["full", "minimal"]
"""`full`: what a client would have seen of each item while it grew; `minimal`: each item once, when it is done."""
TOOL_CHOICES = ("auto", "none", "required")
_READ_FIELDS = frozenset(
    {"input", "instructions", "model", "tools", "chat_template_kwargs", "max_output_tokens", "stream"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponsesOptions(TurnOptions):
    """What a reply repeats of its request, and where the session keeps the items that it was given."""

    tools: tuple[JsonObject, ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    history: HistoryCache = field(default_factory=HistoryCache)


class ResponsesDialect:
    """Responses: parse, render, stream events and errors."""

    name = "responses"
    routes = ("responses",)
    request_id_headers = (b"x-request-id",)
    connected_frame = b": connected\n\n"
    heartbeat_frame = b": waiting\n\n"

    def __init__(self, events: ResponsesEvents = "full"):
        self._events = events

    def parse(self, body: bytes, history: HistoryCache) -> ModelRequest:
        fields = read_body(body)
        conversation, skipped = read_conversation(fields, history)
        items = InputHistory(fields, history)
        digests, messages_between = history.read(len(items), items.key, items.project)
        return ModelRequest(
            options=_options(fields, skipped, conversation.tools, history),
            conversation=conversation,
            digests=digests,
            messages_between=messages_between,
            path_of=items.path,
            images=items.images,
        )

    def render(self, options: TurnOptions, reply: TurnReply) -> bytes:
        return msgspec.json.encode(_finished(_own(options), reply))

    def data_heartbeat(self, options: TurnOptions, request_id: str, created_s: float, num_early: int) -> bytes:
        opened = {"response": _envelope(_own(options), request_id, created_s)}
        return _frames([("in_progress" if num_early else "created", opened)], num_early)

    def stream(self, options: TurnOptions, reply: TurnReply, num_early: int) -> bytes:
        whole = _finished(_own(options), reply)
        events: list[tuple[str, JsonObject]] = []
        if not num_early:
            opened = {**whole, "status": "in_progress", "output": [], "incomplete_details": None, "usage": None}
            events.append(("created", {"response": opened}))
        for index, item in enumerate(whole["output"]):
            events += _item_events(item, index) if self._events == "full" else [_item_done(item, index)]
        events.append((whole["status"], {"response": whole}))
        return _frames(events, num_early)

    def error(self, error: ApiError) -> bytes:
        return msgspec.json.encode(openai_error(_placed(error)))

    def stream_error(self, error: ApiError, num_early: int) -> bytes:
        opened = _envelope(ResponsesOptions(model=error.model), error.request_id, error.created_s)
        failure = {"code": error.code, "message": error.message}
        failed = {**opened, "status": "failed", "error": failure}
        events: list[tuple[str, JsonObject]] = [] if num_early else [("created", {"response": opened})]
        return _frames([*events, ("failed", {"response": failed})], num_early)


def _own(options: TurnOptions) -> ResponsesOptions:
    assert isinstance(options, ResponsesOptions)
    return options


def _placed(error: ApiError) -> ApiError:
    """What the core calls `messages` as a whole comes as `input` here."""
    return replace(error, field="input") if error.field == "messages" else error


def _options(
    fields: RawObject, skipped: tuple[str, ...], tools: tuple[JsonObject, ...], history: HistoryCache
) -> ResponsesOptions:
    choice = read_value(fields.get("tool_choice"), "tool_choice")
    return ResponsesOptions(
        model=read_model(fields),
        stream=read_stream(fields),
        max_tokens=read_limit(fields, "max_output_tokens"),
        ignored_fields=ignored_names(fields, _READ_FIELDS, skipped),
        tools=tools,
        tool_choice=choice if choice in TOOL_CHOICES else "auto",
        parallel_tool_calls=read_value(fields.get("parallel_tool_calls"), "parallel_tool_calls") is not False,
        history=history,
    )


def _envelope(options: ResponsesOptions, request_id: str, created_s: float) -> JsonObject:
    """A response that has only begun."""
    return {
        "id": "resp_" + request_id,
        "object": "response",
        "created_at": int(created_s),
        "model": options.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": [],
        "tools": [_flat_tool(tool) for tool in options.tools],
        "tool_choice": options.tool_choice,
        "parallel_tool_calls": options.parallel_tool_calls,
        "max_output_tokens": options.max_tokens,
        "previous_response_id": None,
        "temperature": None,
        "top_p": None,
        "usage": None,
    }


def _flat_tool(tool: JsonObject) -> JsonObject:
    function = tool["function"]
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", **{name: function.get(name) for name in names}}


def _finished(options: ResponsesOptions, reply: TurnReply) -> JsonObject:
    """The whole response. Its items can be named by their ids from now on."""
    cut = reply.finish == "length"
    parts = _parts(reply)
    for item_id, part in parts:
        options.history.keep_item(item_id, part)
    items = [_item(item_id, part) for item_id, part in parts]
    if cut and items and "status" in items[-1]:
        items[-1]["status"] = "incomplete"
    return {
        **_envelope(options, reply.request_id, reply.created_s),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": items,
        "usage": _usage(reply.usage),
    }


def _parts(reply: TurnReply) -> list[tuple[str, Message]]:
    """The assistant's message in pieces, one an item, with the ids of the items."""
    message, owner = reply.message, reply.request_id
    parts: list[tuple[str, Message]] = []
    if message.reasoning:
        parts.append((f"rs_{owner}", Message(role="assistant", reasoning=message.reasoning)))
    if message.content:
        parts.append((f"msg_{owner}", Message(role="assistant", content=message.content)))
    for index, call in enumerate(message.tool_calls):
        parts.append((f"fc_{owner}_{index}", Message(role="assistant", tool_calls=(call,))))
    return parts


def _item(item_id: str, part: Message) -> JsonObject:
    if part.reasoning:
        summary = [{"type": "summary_text", "text": part.reasoning}]
        return {"id": item_id, "type": "reasoning", "summary": summary, "encrypted_content": sealed(part.reasoning)}
    if part.content:
        content = [{"type": "output_text", "text": part.content, "annotations": []}]
        return {"id": item_id, "type": "message", "role": "assistant", "status": "completed", "content": content}
    (call,) = part.tool_calls
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _usage(usage: TokenUsage) -> JsonObject:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


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
