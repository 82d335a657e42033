"""CPU milliseconds of the gateway a turn, from the kernel's account of its process.

    PYTHONPATH=src python bench/gateway.py [--peer PYTHON] [--blocks 9] [--sizes small large] [--clients 1 16 64]

`silva serve --engine sglang`, a stub server of SGLang's shape and the clients are three processes; all talk HTTP over
loopback. Two shapes of turn:

small   a new session each turn: one 2 KB user message, 264 sampled tokens back
large   64 long conversations in turn: about 46 KB of history, one message of it new, 16.5 k tokens held, 16 tokens back

each with 1, 16 and 64 requests in flight. What is new is tokenised. With `--peer`, the path of a Python that has
`rllm-model-gateway` 0.1.0 (which does not tokenise), that gateway runs in memory mode beside ours, blocks of turns
in random order, on the same clients and the same stub. Figures are medians over the blocks; compare them with each
other, not with those of another machine. At the end one session of 200 turns is timed as a whole.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop

STUB = Path(__file__).parents[1] / "tests" / "support" / "sglang_stub.py"
SMALL_TOKENS = 264
LARGE_TOKENS = 16
LARGE_BYTES = 45_000
NUM_LARGE = 64
END_ID = 302
Json = dict[str, Any]

TEMPLATE = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
WORDS = (
    "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "bring", "tea",
    "and", "read", "every", "line", "of", "log",
)  # fmt: skip


def text(num_bytes: int, seed: int) -> str:
    """Words in an order that the seed gives."""
    out: list[str] = []
    size = 0
    while size < num_bytes:
        seed = (seed * 1103515245 + 12345) % (1 << 31)
        out.append(WORDS[seed % len(WORDS)])
        size += len(out[-1]) + 1
    return " ".join(out)[:num_bytes]


def build_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # Few merges: about 2.8 bytes a token, as 46 KB of history with 16.5 k tokens have.
    core.train_from_iterator(
        [text(20_000, 1)], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    markers = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    core.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


PEER = """
import sys, threading, uvicorn
from rllm_model_gateway.models import GatewayConfig
from rllm_model_gateway.server import create_app
worker = {"url": sys.argv[1] + "/v1"}
app = create_app(GatewayConfig(workers=[worker], store_worker="memory", health_check_interval=3600))
class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print("port", self.servers[0].sockets[0].getsockname()[1], flush=True)
Server(uvicorn.Config(app, port=0, log_level="error", access_log=False)).run()
"""
SILVA = "import sys; from silva.cli import main; sys.exit(main())"


class Child:
    """A process that prints its port in its first line of this form; killed at the end."""

    def __init__(self, command: list[str], port: str):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = re.search(port, line)
            if found:
                self.port = int(found[1])
                return
        raise SystemExit(f"{command[0]} ended without telling its port")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """User and system time of the whole process, ended threads too: its CPU clock, to the nanosecond."""
        return time.clock_gettime((~self._process.pid) << 3 | 2)


def start_stub(num_prompt: int, num_tokens: int, delay_s: float = 0.0) -> Child:
    command = [sys.executable, str(STUB), "--tokens", str(num_tokens), "--prompt-tokens", str(num_prompt)]
    return Child([*command, "--end-id", str(END_ID), "--delay-s", str(delay_s)], r"^(\d+)$")


def start_silva(folder: Path, stub: Child) -> Child:
    options = ["--open-sessions", "--hf-checkpoint", str(folder), "--run-dir", tempfile.mkdtemp(dir=folder) + "/run"]
    engine = ["--engine", "sglang", "--engine-url", f"http://127.0.0.1:{stub.port}"]
    return Child([sys.executable, "-c", SILVA, "serve", *options, *engine], r"ready base_url=\S+:(\d+)/")


def start_peer(python: str, stub: Child) -> Child:
    return Child([python, "-c", PEER, f"http://127.0.0.1:{stub.port}"], r"^port (\d+)$")


class Connection:
    """One keep-alive connection to a gateway."""

    def __init__(self, port: int, prefix: str):
        self._port = port
        self._prefix = prefix
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def turn(self, session: str, messages: list[Json]) -> Json:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        reader, writer = self._streams
        body = json.dumps({"model": "m", "messages": messages}, separators=(",", ":")).encode()
        path = self._prefix.replace("SESSION", session) + "/chat/completions"
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {session}\r\nx-session-id: {session}\r\n"
        writer.write(head.encode() + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", head, re.I)
        assert length is not None, head
        data = await reader.readexactly(int(length[1]))
        assert head.startswith(b"HTTP/1.1 200"), data
        return json.loads(data)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


class Gateway:
    """A gateway under load: `one` is a turn of the shape that is measured."""

    def __init__(self, name: str, child: Child, prefix: str):
        self.name = name
        self.child = child
        self.prefix = prefix
        self.usage: Json = {}
        self._number = 0
        self._idle: list[tuple[str, list[Json]]] = []

    async def prepare_large(self) -> None:
        """The conversations that large turns go on with."""
        self._idle = [(f"large{n}", []) for n in range(NUM_LARGE)]

        async def grow(connection: Connection) -> None:
            session, messages = self._idle.pop(0)
            while len(json.dumps(messages, separators=(",", ":"))) < LARGE_BYTES:
                await self._go_on(connection, session, messages, 700)
            self._idle.append((session, messages))

        await self.run(NUM_LARGE, 16, grow)

    async def small(self, connection: Connection) -> None:
        self._number += 1
        messages = [{"role": "user", "content": text(1950, self._number)}]
        self.usage = (await connection.turn(f"s{self._number}", messages))["usage"]

    async def large(self, connection: Connection) -> None:
        session, messages = self._idle.pop(0)
        await self._go_on(connection, session, messages, 200)
        self._idle.append((session, messages))

    async def _go_on(self, connection: Connection, session: str, messages: list[Json], num_bytes: int) -> None:
        self._number += 1
        asked = {"role": "user", "content": text(num_bytes, self._number)}
        answer = await connection.turn(session, [*messages, asked])
        self.usage = answer["usage"]
        messages += [asked, {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]

    async def run(
        self, num_turns: int, num_clients: int, one: Callable[[Connection], Coroutine[Any, Any, None]]
    ) -> float:
        """CPU milliseconds of the gateway a turn, while so many requests are in flight."""
        left = iter(range(num_turns))

        async def client() -> None:
            connection = Connection(self.child.port, self.prefix)
            for _ in left:
                await one(connection)
            connection.close()

        before_s = self.child.cpu_s()
        await asyncio.gather(*(client() for _ in range(num_clients)))
        return (self.child.cpu_s() - before_s) * 1000 / num_turns


async def compare(folder: Path, size: str, args: argparse.Namespace) -> None:
    num_prompt, num_tokens = (700, SMALL_TOKENS) if size == "small" else (16_500, LARGE_TOKENS)
    with ExitStack() as stack:
        stub = stack.enter_context(start_stub(num_prompt, num_tokens))
        ours = Gateway("silva", stack.enter_context(start_silva(folder, stub)), "/agentic_api/v1")
        gateways = [ours]
        if args.peer is not None:
            peer = stack.enter_context(start_peer(args.peer, stub))
            gateways.append(Gateway("rllm-model-gateway", peer, "/sessions/SESSION/v1"))
        if size == "large":
            for gateway in gateways:
                await gateway.prepare_large()
        for num_clients in args.clients:
            blocks = await alternate(gateways, size, num_clients, args.blocks)
            told = " | ".join(f"{statistics.median(values):.2f} (min {min(values):.2f})" for values in blocks)
            print(f"| {size} | {num_clients} | {told} | {load()} |", flush=True)
        usage = ours.usage
        print(f"{size}: {usage['prompt_tokens']} prompt tokens held, {usage['completion_tokens']} sampled", flush=True)


async def alternate(gateways: list[Gateway], size: str, num_clients: int, num_blocks: int) -> list[list[float]]:
    """CPU milliseconds a turn in each block of each gateway; the first block is for warming up."""
    blocks: list[list[float]] = [[] for _ in gateways]
    for block in range(num_blocks + 1):
        for gateway, values in random.sample(list(zip(gateways, blocks, strict=True)), len(gateways)):
            one = gateway.small if size == "small" else gateway.large
            value = await gateway.run(max(48, num_clients) if block else 192, num_clients, one)
            if block:
                values.append(value)
    return blocks


async def long_session(folder: Path) -> None:
    """All CPU of the gateway for one session of 200 turns: preparing its prompts is a part of that."""
    with start_stub(0, 64) as stub, start_silva(folder, stub) as child:
        gateway = Gateway("silva", child, "/agentic_api/v1")
        gateway._idle = [("long", [])]
        await gateway.run(1, 1, gateway.small)
        total_ms = 200 * await gateway.run(200, 1, gateway.large)
        held = gateway.usage["total_tokens"]
        print(f"a session of 200 turns: {total_ms / 1000:.3f} s of CPU in all, {held} tokens held, load {load()}")


def load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python with rllm-model-gateway installed")
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--sizes", nargs="*", default=["small", "large"], choices=["small", "large"])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 16, 64])
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        build_tokenizer(Path(name))
        columns = ["turn", "in flight", "silva"] + ([] if args.peer is None else ["rllm-model-gateway 0.1.0"])
        print("CPU milliseconds a turn, median of the blocks")
        print("| " + " | ".join([*columns, "load"]) + " |\n" + "| --- " * (len(columns) + 1) + "|", flush=True)
        for size in args.sizes:
            uvloop.run(compare(Path(name), size, args))
        uvloop.run(long_session(Path(name)))


if __name__ == "__main__":
    main()
