"""One conversation spoken in each of the three protocols, with the real SDKs or with bare HTTP.

A plan says what the client adds before each turn; a speaker turns it into the protocol's own words, sends the whole
history and keeps the answer as it came, as a client does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import anthropic
from gateway_serve import Json, Serve
from pictures import chat_part, data_uri, messages_block, png, text


@dataclass(frozen=True)
class Picture:
    """An image of its own for each `mark`; on the `web` it comes by its address."""

    mark: int
    web: bool = False

    @property
    def url(self) -> str:
        return f"https://example.org/{self.mark}.png" if self.web else data_uri(png(mark=self.mark))


Part = str | Picture
"""A piece of a text, or an image between such pieces."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What the client adds before a turn: the results of the calls it was told of, then a user message.

    `results` are texts or images for the calls in order (the last one again where there are more calls); `parts` make
    the user message, none: no message. With neither the history ends in the assistant's message, which goes on or is
    followed by another. `max_tokens` limits the answer.
    """

    parts: tuple[Part, ...] = ()
    results: tuple[Part, ...] = ("done",)
    max_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A conversation. Tools are `{name, description, parameters}`; `shots` are complete foreign turns before it."""

    asks: tuple[Ask, ...]
    system: tuple[str, ...] = ()
    tools: tuple[Json, ...] = ()
    kwargs: Json = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Told:
    """An answer in words that all protocols share. Calls are ids, names and argument values."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str, Any], ...]
    finish: str
    usage: tuple[int, int, int]
    thought_tokens: int | None
    match: str | None = None


class Speaker:
    """A client of one protocol. `stream` asks for SSE; `real` uses the SDK instead of bare HTTP."""

    name: ClassVar[str]
    path: ClassVar[str]
    limit: ClassVar[str]

    def __init__(self, serve: Serve, session_id: str, plan: Plan, *, stream: bool, real: bool):
        self.serve, self.session_id, self.plan = serve, session_id, plan
        self.stream, self.real = stream, real
        self.history: list[Json] = self.opening()
        self.calls: tuple[tuple[str, str, Any], ...] = ()

    async def turn(self, ask: Ask) -> Told:
        results = [ask.results[min(at, len(ask.results) - 1)] for at in range(len(self.calls))] if ask.results else []
        said = [(call[0], result) for call, result in zip(self.calls, results, strict=False)]
        self.history += self.added(said, ask.parts)
        body = self.body() | ({} if ask.max_tokens is None else {self.limit: ask.max_tokens})
        reply = await (self.send_real(body) if self.real else self.send_bare(body))
        told = self.read(reply)
        self.calls = tuple(call for call in told.calls if isinstance(call[2], dict))
        self.history += self.echo(reply)
        return told

    async def close(self) -> None:
        """Give up what the client holds."""

    async def send_bare(self, body: Json) -> Json:
        answer = await self.serve.post(self.session_id, {**body, "stream": self.stream}, self.path)
        assert answer.status_code == 200, answer.text
        return self.assembled(_events(answer.text)) if self.stream else answer.json()

    def opening(self) -> list[Json]:
        return []

    def part(self, part: Part) -> Json:
        return text(part) if isinstance(part, str) else self.picture(part)

    def picture(self, picture: Picture) -> Json:
        return chat_part(picture.url)

    def content(self, parts: Sequence[Part]) -> Any:
        """One text as a plain string, anything else as a list."""
        (only,) = parts if len(parts) == 1 else (None,)
        return only if isinstance(only, str) else [self.part(part) for part in parts]

    def body(self) -> Json:
        raise NotImplementedError

    def added(self, results: list[tuple[str, Part]], parts: tuple[Part, ...]) -> list[Json]:
        raise NotImplementedError

    def read(self, reply: Json) -> Told:
        raise NotImplementedError

    def echo(self, reply: Json) -> list[Json]:
        raise NotImplementedError

    def assembled(self, events: list[Json]) -> Json:
        raise NotImplementedError

    async def send_real(self, body: Json) -> Json:
        raise NotImplementedError


class ChatSpeaker(Speaker):
    name, path, limit = "chat", "/v1/chat/completions", "max_completion_tokens"

    def opening(self) -> list[Json]:
        return [{"role": "system", "content": self.content(self.plan.system)}] if self.plan.system else []

    def body(self) -> Json:
        tools = [{"type": "function", "function": tool} for tool in self.plan.tools]
        return {"model": "m", "messages": self.history} | _given(tools=tools, chat_template_kwargs=self.plan.kwargs)

    def added(self, results: list[tuple[str, Part]], parts: tuple[Part, ...]) -> list[Json]:
        tools = [{"role": "tool", "tool_call_id": name, "content": self.content((part,))} for name, part in results]
        return [*tools, *([{"role": "user", "content": self.content(parts)}] if parts else [])]

    def read(self, reply: Json) -> Told:
        (choice,), usage = reply["choices"], reply["usage"]
        message = choice["message"]
        calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
        return Told(
            content=message["content"] or "",
            reasoning=message.get("reasoning_content") or "",
            calls=tuple((*call[:2], _value(call[2])) for call in calls),
            finish={"stop": "stop", "length": "length", "tool_calls": "calls"}[choice["finish_reason"]],
            usage=_usage(usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]),
            thought_tokens=usage["completion_tokens_details"]["reasoning_tokens"],
        )

    def echo(self, reply: Json) -> list[Json]:
        return [reply["choices"][0]["message"]]

    def assembled(self, events: list[Json]) -> Json:
        (chunk,) = events
        ((choice),) = chunk["choices"]
        message = choice.pop("delta")
        for index, call in enumerate(message.get("tool_calls") or ()):
            assert call.pop("index") == index
        return {**chunk, "choices": [{**choice, "message": message}]}

    async def send_real(self, body: Json) -> Json:
        body, extra = _split(body)
        client: Any = self.serve.sdk(self.session_id, http_client=self.serve.http)
        if not self.stream:
            return (await client.chat.completions.create(**body, extra_body=extra)).model_dump()
        stream = await client.chat.completions.create(**body, extra_body=extra, stream=True)
        return self.assembled([chunk.model_dump() async for chunk in stream])


class ResponsesSpeaker(Speaker):
    name, path, limit = "responses", "/v1/responses", "max_output_tokens"

    def part(self, part: Part) -> Json:
        return {"type": "input_text", "text": part} if isinstance(part, str) else self.picture(part)

    def picture(self, picture: Picture) -> Json:
        return {"type": "input_image", "detail": "auto", "image_url": picture.url}

    def body(self) -> Json:
        tools = [{"type": "function", "strict": False, **tool} for tool in self.plan.tools]
        instructions = "".join(self.plan.system)
        given = _given(tools=tools, instructions=instructions, chat_template_kwargs=self.plan.kwargs)
        return {"model": "m", "input": self.history, "store": False} | given

    def added(self, results: list[tuple[str, Part]], parts: tuple[Part, ...]) -> list[Json]:
        items = [
            {"type": "function_call_output", "call_id": name, "output": self.content((part,))} for name, part in results
        ]
        return [*items, *([{"role": "user", "content": self.content(parts)}] if parts else [])]

    def read(self, reply: Json) -> Told:
        items, usage = reply["output"], reply["usage"]
        texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
        thoughts = [part["text"] for item in items if item["type"] == "reasoning" for part in item["summary"]]
        calls = [(i["call_id"], i["name"], _value(i["arguments"])) for i in items if i["type"] == "function_call"]
        cut = reply["status"] == "incomplete"
        assert cut or reply["status"] == "completed"
        return Told(
            content="".join(texts),
            reasoning="".join(thoughts),
            calls=tuple(calls),
            finish="length" if cut else "calls" if calls else "stop",
            usage=_usage(usage["input_tokens"], usage["output_tokens"], usage["input_tokens_details"]),
            thought_tokens=usage["output_tokens_details"]["reasoning_tokens"],
        )

    def echo(self, reply: Json) -> list[Json]:
        return list(reply["output"])

    def assembled(self, events: list[Json]) -> Json:
        assert len({event["response"]["id"] for event in events if "response" in event}) == 1
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        whole = events[-1]["response"]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == whole["output"]
        return whole

    async def send_real(self, body: Json) -> Json:
        body, extra = _split(body)
        client: Any = self.serve.sdk(self.session_id, http_client=self.serve.http)
        if not self.stream:
            return (await client.responses.create(**body, extra_body=extra)).model_dump(exclude_none=True)
        async with client.responses.stream(**body, extra_body=extra) as stream:
            seen = [event async for event in stream]
        return seen[-1].response.model_dump(exclude_none=True, warnings=False)


class MessagesSpeaker(Speaker):
    name, path, limit = "messages", "/v1/messages", "max_tokens"

    def picture(self, picture: Picture) -> Json:
        if picture.web:
            return {"type": "image", "source": {"type": "url", "url": picture.url}}
        return messages_block(png(mark=picture.mark))

    @cached_property
    def _client(self) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(
            base_url=self.serve.base_url,
            auth_token=self.session_id,
            api_key=None,
            max_retries=0,
            http_client=anthropic.DefaultAsyncHttpxClient(verify=False),
        )

    async def close(self) -> None:
        if self.real:
            await self._client.close()

    def body(self) -> Json:
        tools = [
            {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]}
            for t in self.plan.tools
        ]
        system = [self.part(part) for part in self.plan.system]
        given = _given(system=system, tools=tools, chat_template_kwargs=self.plan.kwargs)
        return {"model": "m", "max_tokens": 20_000, "messages": self.history} | given

    def added(self, results: list[tuple[str, Part]], parts: tuple[Part, ...]) -> list[Json]:
        blocks = [
            {"type": "tool_result", "tool_use_id": name, "content": self.content((part,))} for name, part in results
        ]
        if not blocks and len(parts) == 1 and isinstance(parts[0], str):
            return [{"role": "user", "content": parts[0]}]
        blocks += [self.part(part) for part in parts]
        return [{"role": "user", "content": blocks}] if blocks else []

    def read(self, reply: Json) -> Told:
        blocks, usage = reply["content"], reply["usage"]
        assert reply["stop_sequence"] is None
        return Told(
            content="".join(block["text"] for block in blocks if block["type"] == "text"),
            reasoning="".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            calls=tuple((b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"),
            finish={"end_turn": "stop", "max_tokens": "length", "tool_use": "calls"}[reply["stop_reason"]],
            usage=(
                usage["input_tokens"] + usage["cache_read_input_tokens"],
                usage["output_tokens"],
                usage["cache_read_input_tokens"],
            ),
            thought_tokens=None,
        )

    def echo(self, reply: Json) -> list[Json]:
        return [{"role": "assistant", "content": reply["content"]}]

    def assembled(self, events: list[Json]) -> Json:
        from messages_client import assembled

        return assembled(events)

    async def send_real(self, body: Json) -> Json:
        body, extra = _split(body)
        client: Any = self._client
        if not self.stream:
            return (await client.messages.create(**body, extra_body=extra)).model_dump()
        async with client.messages.stream(**body, extra_body=extra) as stream:
            return (await stream.get_final_message()).model_dump()


SPEAKERS: tuple[type[Speaker], ...] = (ChatSpeaker, ResponsesSpeaker, MessagesSpeaker)


def _events(text: str) -> list[Json]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _given(**fields: Any) -> Json:
    return {name: value for name, value in fields.items() if value}


def _split(body: Json) -> tuple[Json, Json]:
    """What the SDKs have no parameter for goes beside the rest."""
    return {k: v for k, v in body.items() if k != "chat_template_kwargs"}, {
        k: v for k, v in body.items() if k == "chat_template_kwargs"
    }


def _usage(given: int, made: int, details: Json) -> tuple[int, int, int]:
    return given, made, details["cached_tokens"]


def _value(arguments: str) -> Any:
    """Arguments as a value; text where they are no JSON object, or one with a key twice, which no client can keep."""
    try:
        value = json.loads(arguments, object_pairs_hook=_unique)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)
