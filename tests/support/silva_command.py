"""The installed `silva` command, and agents for it: all that runs agents goes through real processes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marked import marked

SILVA = Path(sys.executable).with_name("silva")

AGENT = """
import json, os, socket, sys, time

class HTTPError(Exception):
    def __init__(self, code, headers):
        super().__init__(f"HTTP Error {code}")
        self.code, self.headers = code, headers

def post(body):
    place, _, path = os.environ["RELAX_BASE_URL"].rstrip("/").removeprefix("http://").partition("/")
    host, _, port = place.rpartition(":")
    head = [f"POST {path and '/' + path}/v1/chat/completions HTTP/1.1", f"Host: {place}", "Connection: close"]
    head += ["Authorization: Bearer " + os.environ["RELAX_SESSION_ID"], "Content-Type: application/json"]
    head += [f"Content-Length: {len(body)}", "", ""]
    with socket.create_connection((host, int(port))) as conn:
        conn.sendall("\\r\\n".join(head).encode() + body)
        head, _, answer = conn.makefile("rb").read().partition(b"\\r\\n\\r\\n")
    first, *fields = head.decode().split("\\r\\n")
    code = int(first.split()[1])
    if code != 200:
        raise HTTPError(code, dict(field.split(": ", 1) for field in fields))
    return json.loads(answer)

def ask(messages, **more):
    return post(json.dumps({"model": "m", "messages": messages, **more}).encode())["choices"][0]["message"]

def give(output):
    with open(os.environ["RELAX_OUTPUT_JSON"], "w") as file:
        json.dump(output, file)

task = json.load(open(os.environ["RELAX_INPUT_JSON"]))
messages = task.get("messages") or [{"role": "user", "content": "hello"}]
n = (task.get("metadata") or {}).get("n", 0)
"""
"""The start of every test agent:

`ask` calls the model, `give` writes the output, `messages` and `n` come from the row. Nothing here imports an HTTP
client: that would be most of an agent's CPU time.
"""

TWO_TURNS = (
    AGENT
    + """
for turn in range(2):
    answer = ask(messages, max_tokens=8)
    messages += [answer, {"role": "user", "content": "next"}]
text = answer["content"] or ""
give({"reward": sum(c.islower() for c in text) / 8, "metadata": {"letters": len(text)}})
"""
)


def run_silva(*args: object, cwd: Path, timeout_s: float = 100, env: dict[str, str] | None = None):
    """Run one command to its end."""
    return subprocess.run(
        [str(SILVA), *map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **(env or {})},
    )


@contextmanager
def running_silva(*args: object, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """One command in the background, its output in files in `cwd`; killed at the end if the test has not ended it."""
    with (cwd / "stdout").open("w") as out, (cwd / "stderr").open("w") as err:
        process = subprocess.Popen([str(SILVA), *map(str, args)], cwd=cwd, stdout=out, stderr=err, text=True)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Done:
    """A command that has ended, as `subprocess.CompletedProcess` tells it."""

    returncode: int
    stdout: str
    stderr: str


def in_process(*args: object) -> Done:
    """Run a command that starts nothing (it reads a run, or its options are refused) without a process of its own.

    Paths must be absolute.
    """
    from silva.cli import main

    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        status = main([*map(str, args)])
    return Done(status, out.getvalue(), err.getvalue())


def show(run_dir: Path, *session: str) -> dict[str, Any]:
    """The JSON document of a run or a session."""
    done = in_process("show", run_dir, *session, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def write_rows(path: Path, num: int) -> Path:
    path.write_text("".join(json.dumps({"input": f"q {n}", "metadata": {"n": n}}) + "\n" for n in range(num)))
    return path


def write_script(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def eventually(check: Callable[[], Any], *, timeout_s: float = 60) -> Any:
    """Poll until `check` gives something true; the bound only keeps a broken test from hanging."""
    end = time.monotonic() + timeout_s
    while not (found := check()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)
    return found


def marked_processes(run_dir: Path) -> list[int]:
    """Process ids that carry the marker of this run."""
    from silva.run.parts import run_id_of

    return marked(run_id_of(run_dir))


def runner_pid(trainer: subprocess.Popen[str]) -> int:
    """The runner process of a live trainer."""
    out = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    for line in out.splitlines():
        found = re.match(r"\s*(\d+)\s+(\d+)\s+(.*silva\.processes\.runner import.*)", line)
        if found and int(found[2]) == trainer.pid:
            return int(found[1])
    return 0


def stop(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> int:
    process.send_signal(number)
    return process.wait(timeout=60)
