"""The Anthropic Messages protocol as JSON: a body to its request, a reply or an error to its document."""

from __future__ import annotations

import msgspec

from silva.types import ApiError, JsonObject, Message, RequestError, TurnOptions, TurnReply
from silva.wire.fields import read_common, read_conversation, read_history_list, read_limit, read_stop
from silva.wire.history import HistoryCache
from silva.wire.images import RequestImages
from silva.wire.json_in import RawObject, read_body
from silva.wire.messages_input import project_anthropic_message, project_system, project_tools
from silva.wire.model_request import ModelRequest
from silva.wire.opaque import sealed

_READ_FIELDS = frozenset(
    {"messages", "system", "model", "tools", "chat_template_kwargs", "max_tokens", "stop_sequences", "stream"}
)
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


class MessagesFormat:
    """Messages: bodies, replies, errors and token counts. The `input` of a call in a reply is a `msgspec.Raw`."""

    name = "messages"
    route = "messages"
    count_route = "messages/count_tokens"

    def parse(self, body: bytes, history: HistoryCache) -> ModelRequest:
        fields = read_body(body)
        max_tokens = read_limit(fields, "max_tokens")
        if max_tokens is None:
            raise RequestError("max_tokens is missing; this protocol requires it", field="max_tokens")
        return _request(fields, history, max_tokens)

    def parse_count(self, body: bytes, history: HistoryCache) -> ModelRequest:
        fields = read_body(body)
        return _request(fields, history, read_limit(fields, "max_tokens"))

    def reply(self, options: TurnOptions, reply: TurnReply) -> JsonObject:
        return {
            "id": "msg_" + reply.request_id,
            "type": "message",
            "role": "assistant",
            "model": options.model,
            "content": _content(reply.message),
            **_stop(options, reply),
            "usage": _usage(reply),
        }

    def count(self, num_tokens: int) -> JsonObject:
        return {"input_tokens": num_tokens}

    def error(self, error: ApiError) -> JsonObject:
        """The error form of this protocol. It has no field for a code or a path, so the message names them.

        Clients recognise a full context by the words "prompt is too long".
        """
        kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        message = error.message
        if error.field and error.field not in message:
            message = f"{error.field}: {message}"
        if error.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": error.request_id or None}


def _request(fields: RawObject, history: HistoryCache, max_tokens: int | None) -> ModelRequest:
    conversation, skipped = read_conversation(fields, history, project_tools)
    images = RequestImages()
    system = project_system(fields.get("system"), images)
    raws = read_history_list(fields, "messages")
    first = 0 if system is None else 1
    ignored: list[str] = []

    def key_of(index: int) -> bytes:
        if system is not None and index == 0:
            # No item of `messages` starts like this, so the two never meet in the cache.
            return b"system:" + history.key(fields["system"])
        return history.key(raws[index - first])

    def project(index: int) -> tuple[Message, ...]:
        if system is not None and index == 0:
            return (system,)
        return project_anthropic_message(raws[index - first], f"messages[{index - first}]", images, ignored.append)

    past = history.read_items(first + len(raws), key_of, project)

    def path_of(index: int) -> str:
        item = past.item_of(index)
        return "system" if item < first else f"messages[{item - first}]"

    options = TurnOptions(
        **read_common(fields, _READ_FIELDS, (*skipped, *ignored)),
        max_tokens=max_tokens,
        stop=read_stop(fields, "stop_sequences"),
        object_calls=True,
    )
    return ModelRequest(
        options=options,
        conversation=conversation,
        digests=past.digests,
        messages_between=past.messages_between,
        path_of=path_of,
        images=images,
    )


def _stop(options: TurnOptions, reply: TurnReply) -> JsonObject:
    """Reason and stop string. A stop string of the run that the request did not name is an ordinary end."""
    if reply.finish == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if reply.message.tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if reply.matched_stop in options.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.matched_stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(reply: TurnReply) -> JsonObject:
    """Token counts. In this protocol `input_tokens` leaves out those read from a cache."""
    usage = reply.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def _content(message: Message) -> list[JsonObject]:
    blocks: list[JsonObject] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": sealed(message.reasoning)})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        arguments = msgspec.Raw(call.arguments.encode())
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks
