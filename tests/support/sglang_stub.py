"""A server of SGLang's shape that samples nothing: it answers what it was told to, and plays every kind of failure.

Tests run it in their event loop (`async with SglangStub(...)`), benches as a process of its own:

    python tests/support/sglang_stub.py --tokens 264 --prompt-tokens 700

prints its port and serves until its stdin ends. That one answers chat completions too, for gateways that pass
requests on instead of making tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

Json = dict[str, Any]
MODEL: Json = {"model_path": "stub", "is_generation": True, "weight_version": "default"}
SERVER: Json = {"max_req_input_len": 32768, "version": "0.5.23"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer of POST /generate.

    With `hold_at` k the server samples k ids, then waits for an abort (it answers the k ids, finish `abort`), for a
    lost connection, or for `release`. `fault`: "500", "reset", "hang", "bad_json". `versions` are (version, end)
    pairs. `meta` overwrites fields of meta_info, `body` fields of the whole answer; None takes one away.
    """

    ids: Sequence[int] = ()
    logprob: float = -0.25
    finish: str = "stop"
    matched: int | str | None = None
    hold_at: int | None = None
    fault: str | None = None
    versions: Sequence[tuple[str, int]] = ()
    meta: Json = field(default_factory=dict)
    body: Json = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class _Held:
    rid: str
    aborted: bool = False
    event: asyncio.Event = field(default_factory=asyncio.Event)


class SglangStub:
    """`answers` are taken in order, the last one over and over. `calls` holds each body of /generate as it came,
    `aborts` the rids of /abort_request, `lost` the rids whose client hung up. `status` stands in for every answer
    while it is set; `model` and `server` are what the two info routes say. A request for the log-probs of its own ids
    gets `score(ids, at)` for each, and what `decode` reads it as where it asks for that.
    """

    def __init__(self, *answers: Answer, decode: Callable[[list[int]], str] | None = None):
        self.answers = list(answers)
        self.calls: list[Json] = []
        self.aborts: list[str] = []
        self.lost: list[str] = []
        self.num_connections = self.num_requests = 0
        self.status: int | None = None
        self.model: Json | None = dict(MODEL)
        self.server: Json | None = dict(SERVER)
        self.old_routes = False
        self.score: Callable[[list[int], int], float | None] = lambda ids, at: -0.25
        self._decode = decode
        self._held: list[_Held] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener: asyncio.Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    @property
    def num_held(self) -> int:
        return len(self._held)

    async def __aenter__(self) -> SglangStub:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 24)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        for writer in self._writers:
            writer.transport.abort()

    def release(self) -> None:
        """Let what is held go on to its end."""
        for held in self._held:
            held.event.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        try:
            while True:
                method, path, body = await read_request(reader)
                self.num_requests += 1
                status, answer = await self._route(method, path, body, reader)
                writer.write(response(status, answer))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.transport.abort()
        finally:
            self._writers.discard(writer)

    async def _route(self, method: str, path: str, body: bytes, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        if self.status is not None:
            return self.status, b'{"error": "told to"}'
        prefix = "/get_" if self.old_routes else "/"
        infos = {prefix + "model_info": self.model, prefix + "server_info": self.server}
        if method == "GET" and infos.get(path) is not None:
            return 200, json.dumps(infos[path]).encode()
        if (method, path) == ("POST", "/abort_request"):
            rid = json.loads(body)["rid"]
            self.aborts.append(rid)
            for held in self._held:
                if held.rid.startswith(rid):
                    held.aborted = True
                    held.event.set()
            return 200, b""
        if (method, path) == ("POST", "/generate"):
            return await self._generate(json.loads(body), reader)
        return 404, b'{"detail": "Not Found"}'

    async def _generate(self, call: Json, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        answer = self.answers[min(len(self.calls), len(self.answers) - 1)]
        self.calls.append(call)
        if answer.fault == "reset":
            raise ConnectionResetError
        if answer.fault is not None and answer.fault != "hang":
            return (500, b"told to fail") if answer.fault == "500" else (200, b'{"output_ids": [1,')
        if answer.hold_at is not None or answer.fault == "hang":
            held = await self._hold(call, reader)
            if held.aborted:
                ids = list(answer.ids)[: answer.hold_at or 0]
                answer = replace(answer, ids=ids, finish="abort", matched=None, versions=_cut(answer.versions, ids))
        limited = self._limited(call, answer)
        if call["logprob_start_len"] >= 0:
            limited = replace(limited, meta={"input_token_logprobs": self._scored(call), **answer.meta})
        return 200, json.dumps(_document(call, limited)).encode()

    def _scored(self, call: Json) -> list[list[Any]]:
        ids, start = call["input_ids"], call["logprob_start_len"]
        read = self._decode if call.get("return_text_in_logprobs") else None
        return [
            [None if at == start else self.score(ids, at), ids[at], read and read([ids[at]])]
            for at in range(start, len(ids))
        ]

    async def _hold(self, call: Json, reader: asyncio.StreamReader) -> _Held:
        held = _Held(rid=call["rid"])
        self._held.append(held)
        event = asyncio.ensure_future(held.event.wait())
        gone = asyncio.ensure_future(reader.read(1))  # nobody pipelines: what comes is the end
        try:
            await asyncio.wait({event, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not event.done():
                self.lost.append(held.rid)
                raise ConnectionResetError
            return held
        finally:
            self._held.remove(held)
            event.cancel()
            gone.cancel()
            await asyncio.gather(event, gone, return_exceptions=True)

    def _limited(self, call: Json, answer: Answer) -> Answer:
        """The answer as far as the request's own limits let it come."""
        params, ids = call["sampling_params"], list(answer.ids)
        if answer.finish == "abort":
            return answer
        for num in range(1, len(ids) + 1):
            text = self._decode(ids[:num]) if self._decode and params["stop"] else ""
            stop = next((stop for stop in params["stop"] if stop in text), None)
            if ids[num - 1] in params["stop_token_ids"] or stop is not None:
                matched = ids[num - 1] if stop is None else stop
                return replace(answer, ids=ids[:num], finish="stop", matched=matched)
            if num == params["max_new_tokens"]:
                return replace(answer, ids=ids[:num], finish="length", matched=None)
        return answer


def _cut(versions: Sequence[tuple[str, int]], ids: list[int]) -> list[tuple[str, int]]:
    return [(version, min(end, len(ids))) for version, end in versions]


def _document(call: Json, answer: Answer) -> Json:
    finish: Json = {"type": answer.finish}
    if answer.finish == "stop":
        finish["matched"] = answer.matched
    elif answer.finish == "length":
        finish["length"] = len(answer.ids)
    else:
        finish |= {"message": "Aborted", "status_code": None, "err_type": None}
    meta: Json = {
        "id": call["rid"],
        "finish_reason": finish,
        "prompt_tokens": len(call["input_ids"]),
        "completion_tokens": len(answer.ids),
        "cached_tokens": 0,
        "weight_version": answer.versions[-1][0] if answer.versions else "default",
        "output_token_logprobs": [[answer.logprob, token, None] for token in answer.ids],
    }
    if answer.versions:
        ends = [end for _, end in answer.versions]
        starts = [0, *ends[:-1]]
        meta["weight_versions"] = [
            {"version": version, "start": start, "end": end}
            for (version, end), start in zip(answer.versions, starts, strict=True)
        ]
    meta |= answer.meta
    document: Json = {"text": "", "output_ids": list(answer.ids), "meta_info": meta, **answer.body}
    document["meta_info"] = {name: value for name, value in meta.items() if value is not None}
    return {name: value for name, value in document.items() if answer.body.get(name, 0) is not None}


async def read_request(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    """Method, path and body of the next request."""
    head = await reader.readuntil(b"\r\n\r\n")
    method, path, _ = head.split(b" ", 2)
    size = next((int(h[15:]) for h in head.lower().split(b"\r\n") if h.startswith(b"content-length:")), 0)
    return method.decode(), path.decode(), await reader.readexactly(size)


def response(status: int, body: bytes) -> bytes:
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


async def serve_canned(num_prompt: int, ids: list[int], delay_s: float) -> None:
    """The same ids for every request, as cheaply as can be: what is measured stands before this server."""
    logprobs = [[-0.25, token, None] for token in ids]
    meta = {"finish_reason": {"type": "stop", "matched": ids[-1]}, "weight_version": "default", "cached_tokens": 0}
    generated = json.dumps({"text": "", "output_ids": ids, "meta_info": {**meta, "output_token_logprobs": logprobs}})
    logprobs = [{"token": "a", "logprob": -0.25, "bytes": None, "top_logprobs": []} for _ in ids]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": " ".join(["tea"] * (3 * len(ids) // 4))},
        "finish_reason": "stop",
        "token_ids": ids,
        "logprobs": {"content": logprobs},
    }
    usage = {"prompt_tokens": num_prompt, "completion_tokens": len(ids), "total_tokens": num_prompt + len(ids)}
    chat = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    chat["prompt_token_ids"] = [200 + n % 60 for n in range(num_prompt)]
    answers = {
        "/generate": generated.encode(),
        "/abort_request": b"",
        "/model_info": msgspec.json.encode(MODEL),
        "/server_info": msgspec.json.encode({"max_req_input_len": 1 << 20}),
        "/v1/chat/completions": json.dumps(chat).encode(),
    }

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                _, path, _ = await read_request(reader)
                if delay_s and path == "/generate":
                    await asyncio.sleep(delay_s)
                body = answers.get(path)
                writer.write(response(404, b"{}") if body is None else response(200, body))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 24, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=264, help="ids of each answer; the last one ends the turn")
    parser.add_argument("--prompt-tokens", type=int, default=700, help="prompt ids of a chat completion")
    parser.add_argument("--end-id", type=int, default=302, help="the end-of-turn id")
    parser.add_argument("--delay-s", type=float, default=0.0, help="seconds until each answer")
    args = parser.parse_args()
    ids = [*(40 + n % 200 for n in range(args.tokens - 1)), args.end_id]
    asyncio.run(serve_canned(args.prompt_tokens, ids, args.delay_s))


if __name__ == "__main__":
    main()
