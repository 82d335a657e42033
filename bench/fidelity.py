"""What is left of a session's sampled tokens when its client is not a perfect echo.

    PYTHONPATH=src python bench/fidelity.py [--turns 20]

One `silva serve` with a scripted engine that thinks, speaks and calls a tool in each turn; a client behaves in one way
a session. Real SDKs talk to it over loopback. A row says what came out of the session:

linear     whether the strict implicit export (one root, one leaf) takes it
samples    exported under `--agentic-export leaves`
train on   tokens of those samples, over the tokens of the session's states: 1.0 is no token twice
trained    sampled tokens with mask 1 in some sample, over all sampled tokens
twice      sampled tokens with mask 1 in more than one sample
calls      engine calls; requests beside it
forks      requests, the first apart, that did not go on at the end of the known history; "why" counts those
           of them whose reason is on record (the first difference, or the same history asked again)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from gateway import build_tokenizer

Json = dict[str, Any]
SLOW_S = 1.5
IMPATIENT_S = 0.6
SAID = "<think>\nWhat could it be at step {n}?\n</think>\n\n  Let me look at {n}. \n"
CALL = (
    '<tool_call>\n{{"name": "look", "arguments": '
    '{{"step": {n}, "where": "caf\\u00e9", "deep": {{"a": [1, 2.0]}}}}}}\n</tool_call>'
)
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"step": {"type": "integer"}}}},
}


@dataclass(kw_only=True)
class Client:
    """One session's client. `say` is how it writes an answer into its history."""

    base_url: str
    session_id: str
    turns: int
    timeout_s: float = 60.0
    say: Callable[[Json], Json] = lambda message: message
    history: list[Json] = field(default_factory=list[Json])

    async def ask(self, **fields: Any) -> Json:
        sdk = openai.AsyncOpenAI(
            base_url=self.base_url + "/v1", api_key=self.session_id, max_retries=4, timeout=self.timeout_s
        )
        async with sdk:
            answer = await sdk.chat.completions.create(
                model="m",
                messages=self.history,  # type: ignore[arg-type]
                tools=[TOOL],  # type: ignore[list-item]
                **fields,
            )
        return answer.choices[0].message.model_dump(exclude_unset=True)

    async def step(self, turn: int) -> None:
        message = await self.ask()
        self.history.append(self.say(message))
        self.history += [
            {"role": "tool", "tool_call_id": call["id"], "content": f"found {turn}"} for call in message["tool_calls"]
        ]

    async def run(self, question: str = "Find it.") -> None:
        self.history = [{"role": "system", "content": "You look for things."}, {"role": "user", "content": question}]
        for turn in range(self.turns):
            await self.step(turn)


def with_arguments(rewrite: Callable[[str], str]) -> Callable[[Json], Json]:
    def say(message: Json) -> Json:
        calls = [
            {**call, "function": {**call["function"], "arguments": rewrite(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}

    return say


def without_reasoning(message: Json) -> Json:
    return {key: value for key, value in message.items() if not key.startswith("reasoning")}


def stripped(message: Json) -> Json:
    return {**message, "content": (message["content"] or "").strip()}


def stripped_without_reasoning(message: Json) -> Json:
    return stripped(without_reasoning(message))


async def nonce(client: Client) -> None:
    """A client that writes a fresh billing line into its system prompt with every request, over Messages."""
    client.history = [{"role": "user", "content": "Find it."}]
    tool = {"name": "look", "input_schema": TOOL["function"]["parameters"]}
    async with httpx.AsyncClient(timeout=60, headers={"x-api-key": client.session_id}) as http:
        for turn in range(client.turns):
            line = (
                f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={turn * 7919 + 4096:05x};"
            )
            system = [{"type": "text", "text": line}, {"type": "text", "text": "You look for things."}]
            body = {
                "model": "m", "max_tokens": 4096, "system": system, "messages": client.history, "tools": [tool]
            }  # fmt: skip
            answer = (await http.post(client.base_url + "/v1/messages", json=body)).raise_for_status().json()
            client.history.append({"role": "assistant", "content": answer["content"]})
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": f"found {turn}"}
                for block in answer["content"]
                if block["type"] == "tool_use"
            ]
            client.history.append({"role": "user", "content": results})


async def impatient(client: Client) -> None:
    """The SDK's timeout passes in the middle of the slow turn; it asks again by itself."""
    client.timeout_s = IMPATIENT_S
    await client.run()


async def lost_reply(client: Client) -> None:
    """A proxy swallows one whole reply and breaks the connection; the SDK asks again by itself."""
    async with cutting_proxy(client.base_url, at=client.turns // 2) as base_url:
        client.base_url = base_url
        await client.run()


async def compaction(client: Client) -> None:
    """Half way the client replaces its history by a summary."""
    half, turns = client.turns // 2, client.turns
    client.turns = half
    await client.run()
    client.history = [client.history[0], {"role": "user", "content": "Find it. So far: nothing at the first places."}]
    for turn in range(half, turns):
        await client.step(turn)


async def sub_agents(client: Client) -> None:
    """Five agents with prompts of their own, at the same time, under one key."""
    share = [Client(base_url=client.base_url, session_id=client.session_id, turns=client.turns // 5) for _ in range(5)]
    await asyncio.gather(*(agent.run(f"Find part {number}.") for number, agent in enumerate(share)))


async def best_of(client: Client) -> None:
    """Four samples of the same prompt at the same time, the first of them kept, in each turn."""
    client.history = [{"role": "user", "content": "Find it."}]
    for turn in range(client.turns // 4):
        message, *_ = await asyncio.gather(*(client.ask() for _ in range(4)))
        client.history.append(message)
        client.history += [
            {"role": "tool", "tool_call_id": call["id"], "content": f"found {turn}"} for call in message["tool_calls"]
        ]


def echo(say: Callable[[Json], Json]) -> Callable[[Client], Awaitable[None]]:
    async def run(client: Client) -> None:
        client.say = say
        await client.run()

    return run


SCENARIOS: dict[str, Callable[[Client], Awaitable[None]]] = {
    "verbatim": echo(lambda message: message),
    "arguments re-serialised": echo(
        with_arguments(lambda text: json.dumps(json.loads(text), sort_keys=True, indent=2, ensure_ascii=False))
    ),
    "reasoning dropped": echo(without_reasoning),
    "blanks stripped": echo(stripped),
    "both": echo(stripped_without_reasoning),
    "nonce in each request": nonce,
    "SDK retry after a timeout": impatient,
    "reply lost on the wire": lost_reply,
    "compaction half way": compaction,
    "five parallel sub-agents": sub_agents,
    "best of 4, each turn": best_of,
}


@asynccontextmanager
async def cutting_proxy(base_url: str, *, at: int) -> AsyncIterator[str]:
    """A TCP proxy of one request a connection, which keeps the reply number `at` to itself."""
    host, _, rest = base_url.removeprefix("http://").partition(":")
    port, _, path = rest.partition("/")
    served = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        up_writer.write(head.replace(b"keep-alive", b"close") + body)
        reply = await up_reader.read()
        up_writer.close()
        number, served = served, served + 1
        if number != at:
            writer.write(reply)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/{path}"


def row(name: str, doc: Json, num_calls: int) -> list[str]:
    """One line of the table, from the session's document."""
    nodes = {node["node_id"]: node for node in doc["nodes"]}
    sampled = {n: sum(node["loss_mask"]) for n, node in nodes.items() if node["kind"] == "response"}
    held = sum(len(node["token_ids"]) for node in nodes.values())
    times: dict[int, int] = dict.fromkeys(sampled, 0)
    for sample in doc["samples"]:
        path: list[Json] = []
        node = nodes[sample["node_id"]]
        while node is not None:
            path.insert(0, node)
            node = nodes.get(node["parent_id"])
        mask, at = sample["loss_mask"], 0
        for node in path:
            here = mask[at : at + len(node["token_ids"])]
            at += len(node["token_ids"])
            if node["node_id"] in times and sum(here):
                assert here == node["loss_mask"][: len(here)], "a sample trains a part of a response"
                times[node["node_id"]] += 1
    trained = sum(sampled[n] for n, count in times.items() if count)
    twice = sum(sampled[n] for n, count in times.items() if count > 1)
    starts = [r for r in doc["requests"] if r["match"] == "root" and not r["difference"]]
    forks = [r for r in doc["requests"] if r["match"] in ("branch", "root") and r not in starts[:1]]
    why = [r for r in forks if r["difference"] or r["match"] == "branch"]
    parents = {node["parent_id"] for node in nodes.values()}
    leaves = [n for n in sampled if n not in parents]
    roots = [node for node in nodes.values() if node["kind"] == "root"]
    return [
        name,
        "yes" if len(leaves) == len(roots) == 1 else "no",
        str(len(doc["samples"])),
        f"{sum(len(sample['token_ids']) for sample in doc['samples']) / held:.2f}",
        f"{trained / sum(sampled.values()):.0%}",
        str(twice),
        f"{num_calls} / {len(doc['requests'])}",
        f"{len(forks)} (why {len(why)})",
    ]


async def run(base_url: str, turns: int) -> None:
    for name, scenario in SCENARIOS.items():
        session_id = name.replace(" ", "-").replace(",", "")
        await scenario(Client(base_url=base_url, session_id=session_id, turns=turns))
        async with httpx.AsyncClient(timeout=60) as http:
            answer = await http.post(f"{base_url}/sessions/{session_id}/finish", content=b'{"reward": 1.0}')
            answer.raise_for_status()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=20)
    turns = parser.parse_args().turns
    with tempfile.TemporaryDirectory(prefix="silva-fidelity-") as folder:
        place = Path(folder)
        build_tokenizer(place / "tokenizer")
        lines = [{"text": SAID.format(n=n) + CALL.format(n=n)} for n in range(turns)]
        lines[turns // 2]["delay_s"] = SLOW_S  # type: ignore[assignment]
        script = place / "script.jsonl"
        script.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        silva = str(Path(sys.executable).with_name("silva"))
        command = [silva, "serve", "--open-sessions", "--run-dir", str(place / "run"), "--engine", "scripted"]
        command += ["--engine-script", str(script), "--engine-log", str(place / "calls.jsonl")]
        command += ["--hf-checkpoint", str(place / "tokenizer"), "--agentic-export", "leaves"]
        command += ["--agentic-reasoning-parser", "auto", "--agentic-tool-call-parser", "auto"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serve:
            assert serve.stdout is not None
            base_url = serve.stdout.readline().strip().partition("base_url=")[2]
            try:
                asyncio.run(run(base_url, turns))
            finally:
                serve.terminate()
        calls = [json.loads(line)["session_id"] for line in (place / "calls.jsonl").read_text().splitlines()]
        table = [["client", "linear", "samples", "train on", "trained", "twice", "calls / requests", "forks"]]
        for name in SCENARIOS:
            session_id = name.replace(" ", "-").replace(",", "")
            shown = subprocess.run(
                [silva, "show", str(place / "run"), session_id, "--json"], capture_output=True, text=True, check=True
            )
            table.append(row(name, json.loads(shown.stdout), calls.count(session_id)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
