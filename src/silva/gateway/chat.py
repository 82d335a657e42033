"""The OpenAI Chat Completions protocol."""

from __future__ import annotations

from typing import Any

import msgspec

from silva.gateway.chat_input import project_message, project_tools
from silva.gateway.dialect import ApiError, ModelRequest, TokenLogprob, TurnOptions, TurnReply
from silva.gateway.history import HistoryCache
from silva.gateway.json_in import RawObject, read_body, read_list, read_value
from silva.state.identity import message_digest
from silva.types.errors import RequestError
from silva.types.messages import Conversation, JsonObject, Message

MAX_STOP_STRINGS = 64
MAX_MESSAGES = 1 << 17
MAX_IGNORED_NAMES = 64
RESERVED_TEMPLATE_KWARGS = (
    "add_generation_prompt",
    "tokenize",
    "tools",
    "messages",
    "conversation",
    "chat_template",
    "continue_final_message",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
)
_READ_FIELDS = frozenset(
    {
        "messages",
        "model",
        "tools",
        "chat_template_kwargs",
        "max_completion_tokens",
        "max_tokens",
        "stop",
        "seed",
        "logprobs",
        "stream",
        "n",
    }
)
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 503: "engine_error"}


class ChatDialect:
    """Chat Completions: parse, render, stream frames and errors."""

    name = "chat"
    routes = ("chat/completions",)
    connected_frame = b": connected\n\n"
    heartbeat_frame = b": waiting\n\n"

    def parse(self, body: bytes, history: HistoryCache) -> ModelRequest:
        fields = read_body(body)
        conversation, skipped = _conversation(fields, history)
        raws, digests, known = _digests(fields, history)

        def messages_between(start: int, stop: int) -> tuple[Message, ...]:
            return tuple(
                known[index] if index in known else project_message(raws[index], f"messages[{index}]")
                for index in range(start, stop)
            )

        return ModelRequest(
            options=_options(fields, _ignored(fields, skipped)),
            conversation=conversation,
            digests=digests,
            messages_between=messages_between,
        )

    def render(self, options: TurnOptions, reply: TurnReply) -> bytes:
        choice = {
            "index": 0,
            "message": {"role": "assistant", **_reply_message(reply, indexed=False), "refusal": None},
            "finish_reason": _finish(reply),
            "logprobs": _logprobs(reply),
        }
        return msgspec.json.encode(_envelope("chat.completion", options, reply, choice))

    def stream(self, options: TurnOptions, reply: TurnReply) -> bytes:
        choice = {
            "index": 0,
            "delta": {"role": "assistant", **_reply_message(reply, indexed=True)},
            "finish_reason": _finish(reply),
            "logprobs": _logprobs(reply),
        }
        return _data(_envelope("chat.completion.chunk", options, reply, choice)) + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return msgspec.json.encode(_error(error))

    def stream_error(self, error: ApiError) -> bytes:
        return _data(_error(error)) + b"data: [DONE]\n\n"


def _ignored(fields: RawObject, skipped: tuple[str, ...]) -> tuple[str, ...]:
    """Names of what means nothing here. Each request's row in the ledger keeps them, so there is an end to them."""
    names = [*sorted(fields.keys() - _READ_FIELDS), *skipped]
    shown = [name[:120] for name in names[:MAX_IGNORED_NAMES]]
    more = len(names) - len(shown)
    return (*shown, f"(and {more} more)") if more else tuple(shown)


def _digests(fields: RawObject, history: HistoryCache) -> tuple[list[msgspec.Raw], list[bytes], dict[int, Message]]:
    if "messages" not in fields:
        raise RequestError("messages is missing; it must hold the full history", field="messages")
    raws = read_list(fields["messages"], "messages")
    if not raws:
        raise RequestError("messages is empty; it must hold the full history", field="messages", code="empty_messages")
    if len(raws) > MAX_MESSAGES:
        raise RequestError(
            f"messages holds {len(raws)} messages; at most {MAX_MESSAGES} are accepted",
            field="messages",
            code="context_length_exceeded",
        )
    digests: list[bytes] = []
    known: dict[int, Message] = {}
    for index, raw in enumerate(raws):
        key = history.key(raw)
        digest = history.get(key)
        if digest is None:
            message = known[index] = project_message(raw, f"messages[{index}]")
            digest = message_digest(message)
            history.put(key, digest)
        digests.append(digest)
    return raws, digests, known


def _conversation(fields: RawObject, history: HistoryCache) -> tuple[Conversation, tuple[str, ...]]:
    tools, kwargs = fields.get("tools"), fields.get("chat_template_kwargs")
    key = history.conversation_key(tools, kwargs)
    known = history.conversation(key)
    if known is not None:
        return known
    functions, skipped = project_tools(tools)
    conversation = Conversation(tools=functions, template_kwargs=_template_kwargs(kwargs))
    history.keep_conversation(key, conversation, skipped)
    return conversation, skipped


def _template_kwargs(raw: msgspec.Raw | None) -> JsonObject:
    value = read_value(raw, "chat_template_kwargs")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError("chat_template_kwargs must be an object", field="chat_template_kwargs")
    for name in RESERVED_TEMPLATE_KWARGS:
        if name in value:
            raise RequestError(
                f"chat_template_kwargs.{name} is set by the server; remove it from the request",
                field=f"chat_template_kwargs.{name}",
                code="reserved_argument",
            )
    return value


def _options(fields: RawObject, ignored: tuple[str, ...]) -> TurnOptions:
    num = read_value(fields.get("n"), "n")
    if num is not None and (isinstance(num, bool) or num != 1):
        raise RequestError("n must be 1: one request gives one answer", field="n")
    stream = read_value(fields.get("stream"), "stream")
    if stream is not None and not isinstance(stream, bool):
        raise RequestError("stream must be true or false", field="stream")
    model = read_value(fields.get("model"), "model")
    return TurnOptions(
        model=model if isinstance(model, str) and model else "model",
        stream=bool(stream),
        max_tokens=_max_tokens(fields),
        stop=_stop(fields),
        seed=_seed(fields),
        logprobs=read_value(fields.get("logprobs"), "logprobs") is True,
        ignored_fields=ignored,
    )


def _max_tokens(fields: RawObject) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = read_value(fields.get(name), name)
        if value is None:
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RequestError(f"{name} must be a whole number of at least 1", field=name)
        return value
    return None


def _stop(fields: RawObject) -> tuple[str, ...]:
    value = read_value(fields.get("stop"), "stop")
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise RequestError("stop must be a string or a list of strings", field="stop")
    if "" in items:
        raise RequestError("stop holds an empty string, which would stop every answer at once", field="stop")
    if len(items) > MAX_STOP_STRINGS:
        raise RequestError(f"stop holds {len(items)} strings; at most {MAX_STOP_STRINGS} are accepted", field="stop")
    return tuple(items)


def _seed(fields: RawObject) -> int | None:
    value = read_value(fields.get("seed"), "seed")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError("seed must be a whole number", field="seed")
    return value % (1 << 63)


def _reply_message(reply: TurnReply, *, indexed: bool) -> JsonObject:
    message = reply.message
    out: JsonObject = {"content": message.content}
    if message.reasoning:
        out["reasoning_content"] = out["reasoning"] = message.reasoning
    if message.tool_calls:
        out["content"] = message.content or None
        calls = [call.to_chat() for call in message.tool_calls]
        out["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)] if indexed else calls
    return out


def _finish(reply: TurnReply) -> str:
    if reply.finish == "length":
        return "length"
    return "tool_calls" if reply.message.tool_calls else "stop"


def _logprobs(reply: TurnReply) -> JsonObject | None:
    if reply.logprobs is None:
        return None
    return {"content": [_token(token) for token in reply.logprobs], "refusal": None}


def _token(token: TokenLogprob) -> JsonObject:
    data = None if token.data is None else list(token.data)
    return {"token": token.text, "logprob": token.logprob, "bytes": data, "top_logprobs": []}


def _envelope(kind: str, options: TurnOptions, reply: TurnReply, choice: JsonObject) -> JsonObject:
    usage = reply.usage
    return {
        "id": "chatcmpl-" + reply.request_id,
        "object": kind,
        "created": int(reply.created_s),
        "model": options.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        },
    }


def _error(error: ApiError) -> JsonObject:
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": error.code}}


def _data(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
