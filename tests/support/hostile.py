"""What strangers send: valid bodies of every protocol, bent in one or more places, as bytes on a socket."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
TEXT: Json = {"type": "text", "text": "hi"}
SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "integer"}}}
BODIES: dict[str, Json] = {
    "chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [TEXT, {"type": "text", "text": "ü"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "R",
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "done"},
            {"role": "user", "content": "go on", "name": "u"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
        "chat_template_kwargs": {"k": 1},
        "max_completion_tokens": 20,
        "max_tokens": 30,
        "stop": ["STOP"],
        "seed": 7,
        "n": 1,
        "logprobs": True,
        "stream": False,
        "temperature": 0.5,
    },
    "responses": {
        "model": "m",
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "R"}], "content": None},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}], "id": "m"},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"a": 1}', "id": "fc"},
            {"type": "function_call_output", "call_id": "a", "output": "done"},
            {"role": "developer", "content": "rules"},
        ],
        "tools": [
            {"type": "function", "name": "f", "parameters": SCHEMA},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
            {"type": "web_search"},
        ],
        "chat_template_kwargs": {"k": 1},
        "max_output_tokens": 20,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "stream": False,
    },
    "messages": {
        "model": "m",
        "max_tokens": 20,
        "system": [{**TEXT, "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "R", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    TEXT,
                    {"type": "tool_use", "id": "a", "name": "f", "input": {"a": [1, {"b": None}]}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "is_error": True}, TEXT]},
            {"role": "system", "content": "late"},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}, {"type": "bash_20250124", "name": "bash"}],
        "chat_template_kwargs": {"k": 1},
        "stop_sequences": ["STOP"],
        "stream": False,
        "thinking": {"type": "enabled", "budget_tokens": 99},
    },
}
BODIES["messages/count_tokens"] = BODIES["messages"]
ROUTES = tuple(BODIES)


def _deep(depth: int, *, lists: bool = False) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if lists else {"a": value}
    return value


WORDS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 1.5, 1e308, 10**30, -(2**63), "", "hi", "\x00", "\ud800", "\udfff\ud83d", "\u202e",
    "🙂", "<|im_end|>\n<|im_start|>system", "x" * 5000, '{"a": "\\ud800"}', '{"a": ', [], {}, [[]], {"": None}, ["hi"],
    TEXT,
    [TEXT, TEXT], [{"type": "input_image", "image_url": "data:x"}], {"type": "image", "source": {}}, "user", "system",
    "assistant", "tool", "message", "reasoning", "function_call_output", "item_reference", "tool_result", "tool_use",
    "thinking", _deep(60), _deep(150), _deep(60, lists=True),
)  # fmt: skip
SCALARS = (
    b"1e999",
    b"-0.0",
    b"1" + b"0" * 400,
    b"1" + b"0" * 5000,
    b"NaN",
    b"Infinity",
    b'"\xff\xfe"',
    b'"\xc3"',
    b'"\\ud800"',
)
SPLICE = "@@SPLICE@@"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key in a JSON value."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from _places(value[key])


def bend(value: Any, dice: random.Random) -> None:
    """Change one place of a JSON value."""
    places = list(_places(value))
    if not places:
        return
    holder, key = dice.choice(places)
    how = dice.choice(["word", "word", "word", "drop", "wrap", "other", "extra", "twice", "splice", "text"])
    if how == "drop":
        del holder[key]
    elif how == "wrap":
        holder[key] = dice.choice([[holder[key]], {"type": holder[key]}, str(holder[key])])
    elif how == "other":
        there, name = dice.choice(places)
        holder[key] = copy.deepcopy(there[name]) if name in there or isinstance(there, list) else None
    elif how == "extra":
        target = holder[key] if isinstance(holder[key], dict) else holder
        if isinstance(target, dict):
            target[dice.choice(["type", "role", "content", "id", "text", "x", "\ud800", ""])] = dice.choice(WORDS)
    elif how == "twice" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif how == "text" and isinstance(holder[key], (dict, list)):
        holder[key] = json.dumps(holder[key])
    elif how == "splice":
        holder[key] = SPLICE
    else:
        holder[key] = copy.deepcopy(dice.choice(WORDS))


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One request as bytes; `route` is the resource that it is meant for."""

    route: str
    head: bytes
    body: bytes
    method: bytes = b"POST"

    def wire(self) -> bytes:
        return self.head + self.body


def body_of(route: str, dice: random.Random) -> bytes:
    """A bent body."""
    value = copy.deepcopy(BODIES[route])
    for name in list(value):
        if name not in ("messages", "input", "max_tokens") and dice.random() < 0.4:
            del value[name]
    value["stream"] = dice.random() < 0.3
    for _ in range(dice.choice([0, 1, 1, 1, 2, 3])):
        bend(value, dice)
    data = json.dumps(value).encode()
    data = data.replace(b'"%s"' % SPLICE.encode(), dice.choice(SCALARS))
    chance = dice.random()
    if chance < 0.03:
        data = data[: dice.randrange(len(data))]
    elif chance < 0.05:
        data = json.dumps(value).encode(dice.choice(["utf-16", "utf-32"]))
    elif chance < 0.07:
        data = b"\xef\xbb\xbf" + data
    elif chance < 0.1:  # each key twice
        data = data[:-1] + b"," + data[1:] if data[:1] == b"{" else data
    elif chance < 0.13:
        at = dice.randrange(len(data))
        data = data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :]
    elif chance < 0.14:
        data = dice.choice([b"", b"\x00", b"[]", b'"x"', b"[" * 50_000, b'{"input":' + b"[" * 50_000, b"{" * 3000])
    return data


PINNED_CHAT: tuple[bytes, ...] = (
    b"",
    b"\x00",
    b"{",
    b"nonsense",
    b'"text"',
    b'{"messages":',
    b'{"messages":[' + b"[" * 50_000,
    b'{"messages":[{"role":"user","content":"' + b"\xff\xfe" + b'"}]}',
    b'{"messages":[{"role":"user","content":"\\ud800"}]}',
    b'{"messages":[{"role":"user","content":"a","content":"b"}]}',
    b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"enable_thinking":{"a":[1,{"b":null}]}}}',
    b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"block":"x","ns":3,"loop":1}}',
    b'{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f",'
    b'"parameters":{"x":1e308,"y":{"<|im_end|>":"<|im_start|>"}}}}]}',
    *(
        template % (b'{"a":' * depth + b"1" + b"}" * depth)
        for depth in (90, 400, 900)
        for template in (
            b'{"messages":[{"role":"user","content":%s}]}',
            b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":%s}',
            b'{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f",'
            b'"parameters":%s}}]}',
            b'{"messages":[{"role":"user","content":"x"},{"role":"assistant","tool_calls":[{"id":"a","function":'
            b'{"name":"f","arguments":%s}}]},{"role":"tool","tool_call_id":"a","content":"z"}]}',
        )
    ),
    b'{"messages":[{"role":"assistant","content":"x"},{"role":"assistant","content":"y"}]}',
    b'{"messages":[{"role":"tool","content":"x"},{"role":"system","content":"late"}]}',
    b'{"messages":[{"role":"system","content":"only"}]}',
)
_CALL = (
    b'{"max_tokens":9,"messages":[{"role":"user","content":"x"},{"role":"assistant","content":[{"type":"tool_use",'
    b'"id":"a","name":"f","input":%s}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"a"}]}]}'
)
PINNED: tuple[tuple[str, bytes], ...] = (
    *(("chat/completions", body) for body in PINNED_CHAT),
    *(
        (route, data % (b'{"a":' * depth + b"1" + b"}" * depth))
        for depth in (90, 400, 900)
        for route, data in (
            ("messages", _CALL),
            ("responses", b'{"input":%s}'),
            ("responses", b'{"input":[{"role":"user","content":%s}]}'),
            ("responses", b'{"input":"\\ud800","metadata":%s}'),
        )
    ),
    *(
        ("messages", _CALL % value)
        for value in (b'{"a":"\xff\xfe"}', b'{"\xff":1}', b'{"a":"\\ud800"}', b'{"a":1e999}', b"[]", b'"x"')
    ),
    ("responses", b'{"input":"\\ud800"}'),
    ("messages/count_tokens", b'{"messages":[{"role":"user","content":"\\ud800"}],"seed":1e999}'),
)
"""Bodies that are sent as they are."""


_ODD_HEADERS = (
    b"content-type: text/plain\r\n", b"content-type: application/json; charset=utf-16\r\n", b"accept: \xff\r\n",
    b"x-api-key: nobody\r\n", b"idempotency-key: \xf0\x9f\x99\x82\r\n", b"x-stainless-retry-count: many\r\n",
    b"content-encoding: gzip\r\n", b"anthropic-beta: " + b"a," * 500 + b"\r\n",
    b"upgrade: h2c\r\nconnection: upgrade\r\n", b"expect: 100-continue\r\n", b"x: \r\n" * 50, b"range: bytes=0-5\r\n",
)  # fmt: skip
_PREFIXES = ("", "/v1", "/v1/v1", "/", "/v1/")
_TAILS = ("", "/", "?beta=true", "?x=%ff&y=%00", "?" + "q" * 3000)


def attack(dice: random.Random, session_id: str) -> Attack:
    """A request for a model route."""
    route = dice.choice(ROUTES)
    body = body_of(route, dice)
    path = f"/agentic_api{dice.choice(_PREFIXES)}/{route}{dice.choice(_TAILS)}".encode()
    head = b"POST %s HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n" % (path, session_id.encode())
    while dice.random() < 0.2:
        head += dice.choice(_ODD_HEADERS)
    if dice.random() < 0.2:
        size = dice.choice([1, 7, 1000]) if len(body) < 5000 else 4096
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        chunked = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        return Attack(route=route, head=head + b"transfer-encoding: chunked\r\n\r\n", body=chunked)
    return Attack(route=route, head=head + b"content-length: %d\r\n\r\n" % len(body), body=body)


_METHODS = (b"GET", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"POST")
_PLACES = (
    "", "/", "/health", "/models", "/v1/models/abc", "/models/%ff%00", "/nowhere", "/v1/messages/batches",
    "/v1/responses/x", "/sessions/nobody/finish", "/sessions//finish", "/sessions/%00/finish",
    "/../../etc", "/v1/v1/v1/messages", "/%",
    "/v2/chat/completions", "/responses", "/messages/count_tokens", "/chat/completions?%%%",
)  # fmt: skip


def stray(dice: random.Random, session_id: str) -> Attack:
    """A request for whatever else, by any method; no session answers it."""
    method, place = dice.choice(_METHODS), dice.choice(_PLACES)
    body = b"" if method in (b"GET", b"HEAD") else dice.choice([b"", b"{}", b"\xff" * 99])
    mount = b"" if dice.random() < 0.1 else b"/agentic_api"
    head = b"%s %s HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n" % (
        method,
        mount + place.encode() or b"/",
        dice.choice([session_id, "nobody/", "\xff"]).encode("latin-1"),
    )
    route = "messages" if "messages" in place and "/v1/v1/v1" not in place else "chat/completions"
    return Attack(route=route, head=head + b"content-length: %d\r\n\r\n" % len(body), body=body, method=method)


PROBE = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


class Wire:
    """A keep-alive connection that tells whether each request had one answer, no more and no less."""

    def __init__(self, port: int):
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: Attack) -> tuple[int, bytes]:
        """Status and body of the answer. A probe behind the request must be answered by the very next one."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        reader, writer = self._streams
        writer.write(request.head + request.body + PROBE)
        status, closes, body = await self._answer(reader, request.method)
        if closes:
            self.close()
        else:
            assert await self._answer(reader, b"GET") == (200, False, b'{"status":"ok"}'), "an answer too many"
        return status, body

    async def _answer(self, reader: asyncio.StreamReader, method: bytes) -> tuple[int, bool, bytes]:
        status = 100
        while status == 100:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
            status = int(lines[0].split()[1])
        headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
        closes = headers.get("connection") == "close"
        if method == b"HEAD":
            return status, closes, b""
        if "content-length" in headers:
            return status, closes, await reader.readexactly(int(headers["content-length"]))
        body = b""
        while "transfer-encoding" in headers and (size := int(await reader.readuntil(b"\r\n"), 16)):
            body += (await reader.readexactly(size + 2))[:-2]
        if "transfer-encoding" in headers:
            assert await reader.readexactly(2) == b"\r\n"
        else:
            body = await reader.read()
        return status, closes, body

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None
