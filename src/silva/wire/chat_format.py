"""The OpenAI Chat Completions protocol as JSON: a body to its request, a reply or an error to its document."""

from __future__ import annotations

from silva.types import ApiError, JsonObject, RequestError, TokenLogprob, TurnOptions, TurnReply, shown_field
from silva.wire.chat_input import project_message
from silva.wire.fields import openai_error, read_common, read_conversation, read_history_list, read_limit, read_stop
from silva.wire.history import HistoryCache
from silva.wire.images import RequestImages
from silva.wire.json_in import RawObject, must_be, read_body, read_value
from silva.wire.model_request import ModelRequest

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


class ChatFormat:
    """Chat Completions: bodies, replies and errors."""

    name = "chat"
    route = "chat/completions"

    def parse(self, body: bytes, history: HistoryCache) -> ModelRequest:
        fields = read_body(body)
        conversation, skipped = read_conversation(fields, history)
        raws = read_history_list(fields, "messages")
        images = RequestImages()
        digests, messages_between = history.read(
            len(raws),
            lambda index: history.key(raws[index]),
            lambda index: project_message(raws[index], f"messages[{index}]", images),
        )
        return ModelRequest(
            options=_options(fields, skipped),
            conversation=conversation,
            digests=digests,
            messages_between=messages_between,
            images=images,
        )

    def reply(self, options: TurnOptions, reply: TurnReply) -> JsonObject:
        message = {"role": "assistant", **_reply_message(reply, indexed=False), "refusal": None}
        return _document("chat.completion", options, reply, {"message": message})

    def chunk(self, options: TurnOptions, reply: TurnReply) -> JsonObject:
        """The one chunk of a stream, with the whole turn."""
        delta = {"role": "assistant", **_reply_message(reply, indexed=True)}
        return _document("chat.completion.chunk", options, reply, {"delta": delta})

    def empty_chunk(self, options: TurnOptions, request_id: str, created_s: float) -> JsonObject:
        """A chunk that says nothing yet."""
        return {**_opened("chat.completion.chunk", options, request_id, created_s), "choices": []}

    def error(self, error: ApiError) -> JsonObject:
        return openai_error(error)


def _options(fields: RawObject, skipped: tuple[str, ...]) -> TurnOptions:
    num = read_value(fields.get("n"), "n")
    if num is not None and (isinstance(num, bool) or num != 1):
        raise RequestError(f"n is {shown_field(num)}; it must be 1: one request gives one answer", field="n")
    return TurnOptions(
        **read_common(fields, _READ_FIELDS, skipped),
        max_tokens=read_limit(fields, "max_completion_tokens", "max_tokens"),
        stop=read_stop(fields, "stop"),
        seed=_seed(fields),
        logprobs=read_value(fields.get("logprobs"), "logprobs") is True,
    )


def _seed(fields: RawObject) -> int | None:
    value = read_value(fields.get("seed"), "seed")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise must_be("a whole number", value, "seed")
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


def _opened(kind: str, options: TurnOptions, request_id: str, created_s: float) -> JsonObject:
    return {"id": "chatcmpl-" + request_id, "object": kind, "created": int(created_s), "model": options.model}


def _document(kind: str, options: TurnOptions, reply: TurnReply, turn: JsonObject) -> JsonObject:
    """A reply's document; `turn` is the message or the delta of its one choice."""
    usage = reply.usage
    return {
        **_opened(kind, options, reply.request_id, reply.created_s),
        "choices": [{"index": 0, **turn, "finish_reason": _finish(reply), "logprobs": _logprobs(reply)}],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        },
    }
