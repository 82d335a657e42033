"""Recordings of model traffic: one JSON object per line, as a proxy or `silva serve --record` writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from silva.types import ConfigError, JsonObject, Message, RequestError, read_json, shown_field, system_reason
from silva.wire import (
    FORMATS,
    KEPT_HEADERS,
    HistoryCache,
    InputHistory,
    RequestImages,
    project_anthropic_message,
    project_message,
    route_of,
)

DEFAULT_SESSION = "replay"
MAX_HEADER_CHARS = 1024
_MAX_SHOWN_FAULTS = 10
_SSE_LINE = re.compile(r"\r\n|\r|\n")
"""What ends a line of a stream. Its texts may contain other line breaks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRequest:
    """One model request."""

    line: int
    """Line of the file, from 1."""
    route: str
    """A key of FORMATS."""
    session: str
    """Name of the session in the recording."""
    body: bytes
    """The request body."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Those of KEPT_HEADERS that it has, by lower-case name."""
    answer: Message | None = None
    """The recorded answer, None where it is unknown or an error."""
    items: Mapping[str, JsonObject] = field(default_factory=dict[str, JsonObject])
    """Items of a recorded Responses answer, by id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """The model requests of a file."""

    sessions: dict[str, list[RecordedRequest]]
    """By session, in the order of the file."""
    num_others: int
    """Requests that ask for no turn."""


def read_recording(path: Path) -> Recording:
    """Read and check a recording. Raises ConfigError with the numbers of the lines that are wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--replay {path} cannot be read: {system_reason(error)}") from error
    sessions: dict[str, list[RecordedRequest]] = {}
    faults: list[str] = []
    num_others = 0
    for number, raw in enumerate(text.split("\n"), start=1):
        if not raw.strip():
            continue
        try:
            request = _read_line(raw, number)
        except (ValueError, RecursionError) as error:
            faults.append(f"line {number}: {error}")
            continue
        if request is None:
            num_others += 1
        else:
            sessions.setdefault(request.session, []).append(request)
    if faults:
        more = f"\n... and {len(faults) - _MAX_SHOWN_FAULTS} more" if len(faults) > _MAX_SHOWN_FAULTS else ""
        shown = "\n".join(faults[:_MAX_SHOWN_FAULTS])
        raise ConfigError(f"--replay {path} holds {len(faults)} bad line(s):\n{shown}{more}")
    if not sessions:
        routes = ", ".join(f".../{route}" for route in FORMATS)
        raise ConfigError(f"--replay {path} holds no model request (a POST to {routes})")
    return Recording(sessions=sessions, num_others=num_others)


def _read_line(raw: str, number: int) -> RecordedRequest | None:
    """One line; None where it asks for no turn. Raises ValueError with what is wrong."""
    try:
        line = read_json(raw, constants=True)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(line, dict):
        raise ValueError(f"it is {shown_field(line)}; it must be an object with method, path and body")
    for name in ("method", "path"):
        if not isinstance(line.get(name), str) or not line[name]:
            raise ValueError(f"`{name}` is {shown_field(line.get(name))}; it must be a non-empty text")
    session = line.get("session", DEFAULT_SESSION)
    if not isinstance(session, str) or not session:
        raise ValueError(f"`session` is {shown_field(session)}; it must be a non-empty text")
    headers = _kept(line.get("headers"))
    route = route_of(line["path"])
    if route is None or line["method"].upper() != "POST":
        return None
    body = line.get("body")
    if not isinstance(body, (dict, str)):
        raise ValueError(f"`body` is {shown_field(body)}; it must be the request's JSON object, or its text")
    data = body.encode("utf-8", "replace") if isinstance(body, str) else _json(body)
    answer, items = None, {}
    if line.get("response") is not None:
        try:
            answer, items = read_answer(route, line["response"])
        except (RequestError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"`response` is no answer of the route {route}: {error}") from error
    return RecordedRequest(
        line=number, route=route, session=session, body=data, headers=headers, answer=answer, items=items
    )


def _json(value: object) -> bytes:
    """A JSON text of any value that JSON gave. Half surrogate pairs, which no UTF-8 can hold, become `?`."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def _kept(headers: object) -> dict[str, str]:
    """Those of KEPT_HEADERS, from an object or a list of pairs, without values that no header can have."""
    pairs = headers.items() if isinstance(headers, dict) else headers if isinstance(headers, list) else ()
    named = [pair for pair in pairs if isinstance(pair, (list, tuple)) and len(pair) == 2]
    found = {str(name).lower(): str(value) for name, value in named}
    kept = {name: found.get(name, "") for name in KEPT_HEADERS}
    return {name: value for name, value in kept.items() if value.isprintable() and 0 < len(value) <= MAX_HEADER_CHARS}


def read_answer(route: str, response: Any) -> tuple[Message | None, dict[str, JsonObject]]:
    """The assistant message of a recorded answer (JSON, its text, or the text of a stream), and its items by id.

    None for an answer that is an error. Raises RequestError, KeyError and the like for what is no answer of the route.
    """
    events = _events(response) if isinstance(response, str) else []
    whole: Any = read_json(response, constants=True) if isinstance(response, str) and not events else response
    if not events and not isinstance(whole, dict):
        raise TypeError(f"it is {shown_field(whole)}")
    if any(event.get("type") == "error" or event.get("error") for event in events or [whole]):
        return None, {}
    images = RequestImages()
    if route == "chat/completions":
        message = _chat_merged(events) if events else whole["choices"][0]["message"]
        return project_message(_raw({**message, "role": "assistant"}), "response", images), {}
    if route == "messages":
        content = _blocks_merged(events) if events else whole["content"]
        spoken = _raw({"role": "assistant", "content": content})
        return project_anthropic_message(spoken, "response", images, lambda _: None)[0], {}
    output = _output(events) if events else whole["output"]
    return _spoken(output), {str(item["id"]): item for item in output if isinstance(item, dict) and "id" in item}


def _spoken(output: list[JsonObject]) -> Message:
    if not output:
        return Message(role="assistant")
    history = InputHistory({"input": _raw(output)}, HistoryCache())
    if len(history) != 1:
        raise TypeError("its output is more than one assistant turn")
    return history.project(0)


def _events(text: str) -> list[JsonObject]:
    """The JSON objects in the data lines of a stream."""
    found: list[JsonObject] = []
    for line in _SSE_LINE.split(text):
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data.startswith("{"):
            found.append(cast("JsonObject", read_json(data, constants=True)))
    return found


def _chat_merged(events: list[JsonObject]) -> JsonObject:
    merged: JsonObject = {"content": ""}
    calls: dict[int, JsonObject] = {}
    for event in events:
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            merged["content"] += delta.get("content") or ""
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            merged["reasoning_content"] = merged.get("reasoning_content", "") + thought
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(part.get("index", 0), {"id": "", "function": {"name": "", "arguments": ""}})
                call["id"] = call["id"] or part.get("id") or ""
                for name in ("name", "arguments"):
                    call["function"][name] += (part.get("function") or {}).get(name) or ""
    return {**merged, "tool_calls": [calls[index] for index in sorted(calls)]}


def _blocks_merged(events: list[JsonObject]) -> list[JsonObject]:
    blocks: dict[int, JsonObject] = {}
    inputs: dict[int, str] = {}
    for event in events:
        if event.get("type") == "content_block_start":
            blocks[event["index"]] = dict(event["content_block"])
        elif event.get("type") == "content_block_delta":
            at, delta = event["index"], event["delta"]
            inputs[at] = inputs.get(at, "") + delta.get("partial_json", "")
            for name in ("text", "thinking"):
                if name in delta:
                    blocks[at][name] = blocks[at].get(name, "") + delta[name]
    for at, text in inputs.items():
        if text:
            blocks[at]["input"] = read_json(text, constants=True)
    return [blocks[index] for index in sorted(blocks)]


def _output(events: list[JsonObject]) -> list[JsonObject]:
    """The items of the terminal event, else those of the `done` events."""
    for event in reversed(events):
        if (event.get("response") or {}).get("output"):
            return event["response"]["output"]
    return [event["item"] for event in events if event.get("type") == "response.output_item.done"]


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(_json(value))
