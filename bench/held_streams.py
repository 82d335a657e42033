"""Thousands of streams that wait for their engine: what they cost, and whether one is lost.

    PYTHONPATH=src python bench/held_streams.py [--streams 2000] [--seconds 60]

`silva serve --engine sglang`, a stub server that takes `--seconds` for each answer, and the clients are three processes
on `--cores` cores. Every stream gets a heartbeat each 15 s and its answer at the end. Each takes two sockets of the
gateway, so the limit of open files is raised for all three. Memory is what the gateway's private memory grew by from
before the first of them to the end of the wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop
from gateway import Child, build_tokenizer, load, start_silva, start_stub, text

HEARTBEAT = b": waiting\n\n"
NUM_TOKENS = 16


@dataclass(kw_only=True)
class Seen:
    """What the clients got."""

    num_open: int = 0
    num_heartbeats: int = 0
    num_done: int = 0
    num_dropped: int = 0


async def stream(port: int, number: int, seen: Seen, all_open: asyncio.Event, num_streams: int) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": text(1950, number)}], "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /agentic_api/v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer s{number}\r\n"
    got = b""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data)
        status = await reader.readuntil(b"\r\n\r\n")
        assert status.startswith(b"HTTP/1.1 200"), status
        seen.num_open += 1
        if seen.num_open == num_streams:
            all_open.set()
        while not got.endswith(b"0\r\n\r\n"):
            chunk = await reader.read(1 << 16)
            if not chunk:
                break
            seen.num_heartbeats += chunk.count(HEARTBEAT)
            got += chunk
        writer.close()
    except (OSError, asyncio.IncompleteReadError, AssertionError) as error:
        print(f"stream {number}: {error!r}")
    done = b"data: [DONE]" in got and b'"finish_reason":"stop"' in got
    seen.num_done += done
    seen.num_dropped += not done
    all_open.set()


def private_bytes(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(size) << 10 for size in re.findall(r"^Private_\w+: +(\d+) kB", rollup, re.M))


async def hold(child: Child, num_streams: int, seconds: float) -> None:
    seen, all_open = Seen(), asyncio.Event()
    warm = Seen()
    await stream(child.port, num_streams, warm, asyncio.Event(), 1)
    before_bytes, before_s, since_s = private_bytes(child.pid), child.cpu_s(), time.monotonic()
    clients: list[asyncio.Task[None]] = []
    for number in range(num_streams):
        clients.append(asyncio.create_task(stream(child.port, number, seen, all_open, num_streams)))
        if number % 20 == 19:
            await asyncio.sleep(0.05)
    await all_open.wait()
    opened_s, opened_cpu_s = time.monotonic(), child.cpu_s()
    print(f"{seen.num_open} open after {opened_s - since_s:.1f} s, {opened_cpu_s - before_s:.2f} s of CPU")
    await asyncio.sleep(max(0.0, since_s + seconds - 2 - time.monotonic()))
    waited_s, held_bytes = time.monotonic() - opened_s, private_bytes(child.pid)
    waiting_cpu_s, beats = child.cpu_s() - opened_cpu_s, seen.num_heartbeats
    print(f"held for {waited_s:.1f} s more: {beats} heartbeats, {100 * waiting_cpu_s / waited_s:.1f} % of one core")
    print(f"memory: {(held_bytes - before_bytes) / num_streams / 1024:.1f} KiB a stream")
    await asyncio.gather(*clients)
    print(f"answered {seen.num_done}, dropped {seen.num_dropped}; heartbeats in all: {seen.num_heartbeats}")
    print(f"CPU in all {child.cpu_s() - before_s:.2f} s, load {load()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cores", type=int, default=2)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: args.cores]))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * args.streams + 1024), hard))
    with tempfile.TemporaryDirectory() as name:
        build_tokenizer(Path(name))
        with start_stub(0, NUM_TOKENS, args.seconds) as stub, start_silva(Path(name), stub) as child:
            uvloop.run(hold(child, args.streams, args.seconds))


if __name__ == "__main__":
    main()
