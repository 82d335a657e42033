"""Request fields that protocols share, and the error form that both OpenAI protocols share."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import TypedDict

import msgspec

from silva.forest import canonical_tool
from silva.types import ApiError, Conversation, JsonObject, RequestError
from silva.wire.content import project_tools
from silva.wire.history import HistoryCache, KnownConversation
from silva.wire.json_in import RawObject, must_be, read_list, read_optional, read_value

MAX_MESSAGES = 1 << 17
MAX_IGNORED_NAMES = 64
MAX_STOP_STRINGS = 64
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
ProjectTools = Callable[[msgspec.Raw | None], tuple[tuple[JsonObject, ...], tuple[str, ...]]]
"""From raw tools to nested functions, and paths with types of the tools that were skipped."""
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 500: "server_error", 503: "engine_error"}


class CommonOptions(TypedDict):
    """Fields of TurnOptions that every protocol has."""

    model: str
    stream: bool
    ignored_fields: tuple[str, ...]


def read_common(fields: RawObject, read: Set[str], skipped: tuple[str, ...]) -> CommonOptions:
    """`read` are the fields that the protocol reads, `skipped` names what it skipped inside them."""
    model = read_value(fields.get("model"), "model")
    # The row of each request in the ledger keeps the names, so their number is bounded.
    names = [*sorted(fields.keys() - read), *skipped]
    kept = [name[:120] for name in names[:MAX_IGNORED_NAMES]]
    if len(names) > len(kept):
        kept.append(f"(and {len(names) - len(kept)} more)")
    return {
        "model": model if isinstance(model, str) and model else "model",
        "stream": bool(read_optional(fields.get("stream"), "stream", bool, "true or false")),
        "ignored_fields": tuple(kept),
    }


def read_history_list(fields: RawObject, name: str) -> list[msgspec.Raw]:
    """The list with a request's whole history; its items are not parsed yet."""
    if name not in fields:
        raise RequestError(f"{name} is missing; it must contain the full history", field=name)
    raws = read_list(fields[name], name)
    if not raws:
        raise RequestError(f"{name} is empty; it must contain the full history", field=name, code="empty_messages")
    if len(raws) > MAX_MESSAGES:
        raise RequestError(
            f"{name} holds {len(raws)} entries; at most {MAX_MESSAGES} are accepted",
            field=name,
            code="context_length_exceeded",
        )
    return raws


def read_conversation(
    fields: RawObject, history: HistoryCache, project: ProjectTools = project_tools
) -> KnownConversation:
    """Tools and template arguments of a request, and the names of the tools that were skipped."""
    tools, kwargs = fields.get("tools"), fields.get("chat_template_kwargs")

    def read() -> KnownConversation:
        functions, skipped = project(tools)
        known = tuple(canonical_tool(tool) for tool in functions)
        return Conversation(tools=known, template_kwargs=_template_kwargs(kwargs)), skipped

    return history.conversation((tools, kwargs), read)


def _template_kwargs(raw: msgspec.Raw | None) -> JsonObject:
    value = read_optional(raw, "chat_template_kwargs", dict, "an object") or {}
    for name in RESERVED_TEMPLATE_KWARGS:
        if name in value:
            raise RequestError(
                f"chat_template_kwargs.{name} is set by the server; remove it from the request",
                field=f"chat_template_kwargs.{name}",
                code="reserved_argument",
            )
    return value


def read_limit(fields: RawObject, *names: str) -> int | None:
    """The largest number of tokens to sample, from the first of these fields that is set."""
    for name in names:
        value = read_value(fields.get(name), name)
        if value is None:
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise must_be("a whole number of at least 1", value, name)
        return value
    return None


def read_stop(fields: RawObject, name: str) -> tuple[str, ...]:
    """Stop strings: one, or a list."""
    value = read_value(fields.get(name), name)
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise must_be("a string or a list of strings", value, name)
    if "" in items:
        raise RequestError(f"{name} holds an empty string, which would stop every answer at once", field=name)
    if len(items) > MAX_STOP_STRINGS:
        raise RequestError(f"{name} holds {len(items)} strings; at most {MAX_STOP_STRINGS} are accepted", field=name)
    return tuple(items)


def openai_error(error: ApiError) -> JsonObject:
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": error.code}}
