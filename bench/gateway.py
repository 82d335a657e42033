"""CPU milliseconds of the gateway per turn, from its own process's accounting.

    PYTHONPATH=src python bench/gateway.py [--turns 300]

The gateway and its scripted engine run in a child process, the client in this one, over loopback HTTP. Two shapes of turn:

small   a new session each turn: one 2 KB user message, 264 sampled tokens back
large   a long conversation: about 46 KB of history of which one message is new, 16.5 k tokens held, 16 tokens back

What is new is tokenised in both. The time of the engine stub (reading its script, answering) is inside the figure.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SMALL_TOKENS = 264
LARGE_TOKENS = 16
LARGE_BYTES = 46_000

TEMPLATE = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards bring tea and read every line of the log".split()


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


async def serve(folder: Path, num_tokens: int) -> None:
    """The child: a gateway that says its port, then its CPU seconds at each line on stdin."""
    from silva.gateway.app import GatewayApp
    from silva.gateway.server import GatewayServer, ServerSettings
    from silva.gateway.sessions import SessionRegistry
    from silva.gateway.turns import TurnService, TurnSettings
    from silva.inference.scripted import ScriptedEngine, ScriptLine
    from silva.state.codec import TurnCodec
    from silva.state.parsers import TurnParser
    from silva.types.clock import SystemClock

    clock, codec = SystemClock(), TurnCodec.load(folder)
    ids = codec.encode_sampled(text(8000, 7))[: num_tokens - 1]
    engine = ScriptedEngine([ScriptLine(ids=ids)], codec=codec, clock=clock, max_context_len=1 << 20)
    registry = SessionRegistry(engine, clock, open_sessions=True)
    parser = TurnParser(reasoning=True, tool_calls=True)
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
    """The gateway process, and one keep-alive connection to it."""

    def __init__(self, folder: Path, num_tokens: int, loop: str):
        command = [sys.executable, __file__, "--serve", str(folder), "--tokens", str(num_tokens), "--loop", loop]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._http = http.client.HTTPConnection("127.0.0.1", int(self._read()), timeout=60)

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
        headers = {"authorization": f"Bearer {session}", "content-type": "application/json"}
        self._http.request("POST", "/agentic_api/v1/chat/completions", body=body, headers=headers)
        answer = self._http.getresponse()
        data = answer.read()
        assert answer.status == 200, data
        return json.loads(data)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


def bench_small(child: Child, num_turns: int) -> tuple[float, dict[str, Any]]:
    usage: dict[str, Any] = {}
    for phase, count in (("warm", 30), ("run", num_turns)):
        before_s = child.cpu_s()
        for number in range(count):
            usage = child.turn(f"{phase}{number}", [{"role": "user", "content": text(1950, number)}])["usage"]
    return (child.cpu_s() - before_s) * 1000 / num_turns, usage


def bench_large(child: Child, num_turns: int) -> tuple[float, dict[str, Any]]:
    """Grow a conversation to 46 KB, then take the turns around that size: half before, half after."""
    messages: list[dict[str, Any]] = []
    number = 0

    def one_turn(new_bytes: int) -> dict[str, Any]:
        nonlocal number
        number += 1
        messages.append({"role": "user", "content": text(new_bytes, number)})
        answer = child.turn("large", messages)
        messages.append(answer["choices"][0]["message"])
        return answer["usage"]

    while len(json.dumps(messages, separators=(",", ":"))) < LARGE_BYTES:
        one_turn(700)
    before_s, usage = child.cpu_s(), {}
    at_size = messages[:]
    for _ in range(num_turns):
        messages[:] = at_size
        usage = one_turn(200)
    return (child.cpu_s() - before_s) * 1000 / num_turns, usage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="uvloop")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=SMALL_TOKENS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        import uvloop

        runner = uvloop.run if args.loop == "uvloop" else asyncio.run
        runner(serve(args.serve, args.tokens))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        build_tokenizer(Path(name))
        for label, bench, tokens in (("small", bench_small, SMALL_TOKENS), ("large", bench_large, LARGE_TOKENS)):
            child = Child(Path(name), tokens, args.loop)
            cpu_ms, usage = bench(child, args.turns)
            child.close()
            print(
                f"{label}: {cpu_ms:.2f} CPU ms a turn ({usage['prompt_tokens']} prompt tokens held, "
                f"{usage['completion_tokens']} sampled)"
            )


if __name__ == "__main__":
    main()
