"""CPU milliseconds of the gateway per turn, from its own process's accounting.

    PYTHONPATH=src python bench/gateway.py [--turns 300] [--peer PYTHON]

Gateway, stub engine and client are three processes; all talk HTTP over loopback. Two shapes of turn:

small   a new session each turn: one 2 KB user message, 264 sampled tokens back
large   a long conversation: about 46 KB of history, one message of it new, 16.5 k to 20 k tokens held, 16 tokens back

What is new is tokenised in both. With `--peer`, the path of a Python that has `rllm-model-gateway` 0.1.0 (which does
not tokenise), that gateway runs in memory mode beside ours, turn blocks alternating, on the same client and stub. The
figures are medians over the blocks; compare them with each other, not with those of another machine.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SMALL_TOKENS = 264
LARGE_TOKENS = 16
LARGE_BYTES = 46_000
END_ID = 302

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
import sys, threading, resource, uvicorn
from rllm_model_gateway.models import GatewayConfig
from rllm_model_gateway.server import create_app
worker = {"url": "http://127.0.0.1:" + sys.argv[1] + "/v1"}
app = create_app(GatewayConfig(workers=[worker], store_worker="memory", health_check_interval=3600))
class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)
        threading.Thread(target=tell, daemon=True).start()
def tell():
    while sys.stdin.readline():
        use = resource.getrusage(resource.RUSAGE_SELF)
        print(use.ru_utime + use.ru_stime, flush=True)
    server.should_exit = True
server = Server(uvicorn.Config(app, port=0, log_level="error", access_log=False))
server.run()
"""


async def stub_engine(num_prompt: int, num_tokens: int) -> None:
    """The engine's process: the same answer to every call, in our form and in that of an OpenAI-shaped server."""
    ids = [*(40 + n % 200 for n in range(num_tokens - 1)), END_ID]
    logprobs = [-0.25] * num_tokens
    ours = json.dumps({"ids": ids, "logprobs": logprobs}).encode()
    content = text(num_tokens * 3, 5)
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content},
        "finish_reason": "stop",
        "token_ids": ids,
        "logprobs": {"content": [{"token": "a", "logprob": x, "bytes": None, "top_logprobs": []} for x in logprobs]},
    }
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}
    peers = json.dumps(
        {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": usage,
            "prompt_token_ids": [200 + n % 60 for n in range(num_prompt)],
        }
    ).encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = next((int(h[15:]) for h in head.lower().split(b"\r\n") if h.startswith(b"content-length:")), 0)
                await reader.readexactly(size)
                body = ours if head.startswith(b"POST /generate") else peers
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
                writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 22)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def http_engine(port: int) -> Any:
    """An engine behind HTTP: ids out as JSON, ids and log-probs back, over one kept connection."""
    import msgspec

    from silva.types.generation import EngineUsage, GenerateRequest, GenerateResult, VersionSpan

    class HttpEngine:
        version = 0
        max_context_len = 1 << 20
        image_support = "none"
        streams: Any = None

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            if self.streams is None:
                self.streams = await asyncio.open_connection("127.0.0.1", port)
            reader, writer = self.streams
            params = {"max_new_tokens": request.sampling.max_new_tokens, "seed": request.sampling.seed}
            body = msgspec.json.encode({"rid": request.request_id, "input_ids": request.input_ids, "params": params})
            writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            head = await reader.readuntil(b"\r\n\r\n")
            answer = msgspec.json.decode(await reader.readexactly(int(head.rpartition(b":")[2])))
            num = len(answer["ids"])
            return GenerateResult(
                ids=answer["ids"],
                logprobs=answer["logprobs"],
                kept_mass=[1.0] * num,
                finish_reason="stop",
                version_spans=(VersionSpan(start=0, length=num, version=0),),
                matched_stop=answer["ids"][-1],
            )

        async def abort(self, request_id: str) -> None: ...

        async def close_session(self, session_id: str) -> None: ...

        def usage(self) -> EngineUsage:
            return EngineUsage()

    return HttpEngine()


async def serve(folder: Path, engine_port: int) -> None:
    """The gateway's process: it says its port, then its CPU seconds at each line on stdin."""
    from silva.gateway.app import GatewayApp
    from silva.gateway.server import GatewayServer, ServerSettings
    from silva.gateway.sessions import SessionRegistry
    from silva.gateway.turns import TurnService, TurnSettings
    from silva.state.codec import TurnCodec
    from silva.state.parsers import TurnParser
    from silva.types.clock import SystemClock

    clock, codec, engine = SystemClock(), TurnCodec.load(folder), http_engine(engine_port)
    assert codec.end_of_turn_id() == END_ID
    registry = SessionRegistry(engine, clock, open_sessions=True)
    parser = TurnParser.from_names(reasoning="generic", tool_call="generic")
    turns = TurnService(engine=engine, codec=codec, parser=parser, clock=clock, settings=TurnSettings())
    server = GatewayServer(GatewayApp(registry, turns, clock), ServerSettings())
    await server.start()
    print(server.port, flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        use = resource.getrusage(resource.RUSAGE_SELF)
        print(use.ru_utime + use.ru_stime, flush=True)
    await registry.close()
    await server.close()


class Child:
    """A process that prints its port, and one keep-alive connection to it."""

    def __init__(self, command: list[str], prefix: str = "/agentic_api/v1"):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self._read())
        self._prefix = prefix
        self._http = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def cpu_s(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._read())

    def turn(self, session: str, messages: list[Any]) -> dict[str, Any]:
        body = json.dumps({"model": "m", "messages": messages}, separators=(",", ":"))
        headers = {"authorization": f"Bearer {session}", "content-type": "application/json", "x-session-id": session}
        path = self._prefix.replace("SESSION", session) + "/chat/completions"
        self._http.request("POST", path, body=body, headers=headers)
        answer = self._http.getresponse()
        data = answer.read()
        assert answer.status == 200, data
        return json.loads(data)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


class Small:
    """A new session each turn."""

    def __init__(self, child: Child):
        self.child = child
        self._number = 0

    def turn(self) -> dict[str, Any]:
        self._number += 1
        messages = [{"role": "user", "content": text(1950, self._number)}]
        return self.child.turn(f"s{self._number}", messages)["usage"]


class Large:
    """One conversation grown to 46 KB; then turns that each add one message to it."""

    def __init__(self, child: Child):
        self.child = child
        self._number = 0
        self._messages: list[dict[str, Any]] = []
        while len(json.dumps(self._messages, separators=(",", ":"))) < LARGE_BYTES:
            self._messages += self._take(700)

    def _take(self, num_bytes: int) -> list[dict[str, Any]]:
        self._number += 1
        asked = {"role": "user", "content": text(num_bytes, self._number)}
        answer = self.child.turn("large", [*self._messages, asked])
        self.usage = answer["usage"]
        return [asked, {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]

    def turn(self) -> dict[str, Any]:
        self._take(200)
        return self.usage


def block_ms(load: Small | Large, num_turns: int) -> float:
    before_s = load.child.cpu_s()
    for _ in range(num_turns):
        load.turn()
    return (load.child.cpu_s() - before_s) * 1000 / num_turns


def compare(folder: Path, label: str, make: type[Small] | type[Large], num_turns: int, peer: str | None) -> None:
    num_prompt, num_tokens = (700, SMALL_TOKENS) if make is Small else (16_500, LARGE_TOKENS)
    stub = Child([sys.executable, __file__, "--stub", str(num_prompt), "--tokens", str(num_tokens)])
    command = [sys.executable, __file__, "--serve", str(folder), "--engine-port", str(stub.port)]
    loads = {"silva": make(Child(command))}
    if peer is not None:
        loads["rllm-model-gateway"] = make(Child([peer, "-c", PEER, str(stub.port)], "/sessions/SESSION/v1"))
    blocks: dict[str, list[float]] = {name: [] for name in loads}
    for block in range(11):
        for name, load in loads.items():
            value = block_ms(load, max(1, num_turns // 10))
            if block:
                blocks[name].append(value)
    usage = loads["silva"].turn()
    for name, values in blocks.items():
        print(f"{label} {name}: {statistics.median(values):.2f} CPU ms a turn (min {min(values):.2f})")
    print(f"{label}: {usage['prompt_tokens']} prompt tokens held, {usage['completion_tokens']} sampled")
    for load in loads.values():
        load.child.close()
    stub.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--peer", help="a Python with rllm-model-gateway installed")
    for name, kind in (("--serve", Path), ("--engine-port", int), ("--stub", int), ("--tokens", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stub is not None:
        asyncio.run(stub_engine(args.stub, args.tokens))
        return
    if args.serve is not None:
        import uvloop

        uvloop.run(serve(args.serve, args.engine_port))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        build_tokenizer(Path(name))
        for label, make in (("small", Small), ("large", Large)):
            compare(Path(name), label, make, args.turns, args.peer)


if __name__ == "__main__":
    main()
