"""The OpenAI Responses protocol as JSON: a body to its request, a reply or an error to its document."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from silva.types import ApiError, JsonObject, Message, TokenUsage, TurnOptions, TurnReply
from silva.wire.fields import openai_error, read_common, read_conversation, read_limit
from silva.wire.history import HistoryCache
from silva.wire.json_in import RawObject, read_body, read_value
from silva.wire.model_request import ModelRequest
from silva.wire.opaque import sealed
from silva.wire.responses_input import InputHistory

TOOL_CHOICES = ("auto", "none", "required")
_READ_FIELDS = frozenset(
    {"input", "instructions", "model", "tools", "chat_template_kwargs", "max_output_tokens", "stream"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponsesOptions(TurnOptions):
    """What a reply repeats of its request, and where the session keeps the items that it got."""

    tools: tuple[JsonObject, ...] = ()
    """Function tools in nested form."""
    tool_choice: str = "auto"
    """One of TOOL_CHOICES."""
    parallel_tool_calls: bool = True
    """As the request says; it changes nothing."""
    history: HistoryCache = field(default_factory=HistoryCache)
    """The session's cache, which keeps the items of the reply by their ids."""


class ResponsesFormat:
    """Responses: bodies, replies and errors."""

    name = "responses"
    route = "responses"

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

    def opened(self, options: TurnOptions, request_id: str, created_s: float) -> JsonObject:
        """A response that has only begun."""
        return _envelope(_own(options), request_id, created_s)

    def reply(self, options: TurnOptions, reply: TurnReply) -> JsonObject:
        """The whole response. Its items can be named by their ids from now on."""
        own = _own(options)
        cut = reply.finish == "length"
        parts = _parts(reply)
        for item_id, part in parts:
            own.history.keep_item(item_id, part)
        items = [_item(item_id, part) for item_id, part in parts]
        if cut and items and "status" in items[-1]:
            items[-1]["status"] = "incomplete"
        return {
            **_envelope(own, reply.request_id, reply.created_s),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items,
            "usage": _usage(reply.usage),
        }

    def error(self, error: ApiError) -> JsonObject:
        # What the core calls `messages` as a whole comes as `input` here.
        return openai_error(replace(error, field="input") if error.field == "messages" else error)


def _own(options: TurnOptions) -> ResponsesOptions:
    assert isinstance(options, ResponsesOptions)
    return options


def _options(
    fields: RawObject, skipped: tuple[str, ...], tools: tuple[JsonObject, ...], history: HistoryCache
) -> ResponsesOptions:
    choice = read_value(fields.get("tool_choice"), "tool_choice")
    return ResponsesOptions(
        **read_common(fields, _READ_FIELDS, skipped),
        max_tokens=read_limit(fields, "max_output_tokens"),
        tools=tools,
        tool_choice=choice if choice in TOOL_CHOICES else "auto",
        parallel_tool_calls=read_value(fields.get("parallel_tool_calls"), "parallel_tool_calls") is not False,
        history=history,
    )


def _envelope(options: ResponsesOptions, request_id: str, created_s: float) -> JsonObject:
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
