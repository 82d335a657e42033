"""Eight real agent programs in sessions of `silva rollout`, through the launchers of examples/harness.

bash scripts/install_harness.sh && SILVA_HARNESS=1 python -m pytest tests/harness
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from silva_command import marked_processes, run_silva, show, write_script

ROOT = Path(__file__).parents[2]
INSTALLED = Path(os.environ.get("SILVA_HARNESS_DIR", ROOT / ".cache" / "harness")) / "installed"
RAN = "echo $((4240 + 2)) | tee ran.txt"
"""A command whose result stands neither in itself nor in the task."""
ANSWER = "It is 4242."
Json = dict[str, Any]

pytestmark = [pytest.mark.harness, pytest.mark.timeout(400)]


@dataclass(frozen=True, kw_only=True)
class Client:
    """What a client calls its shell, what it speaks, and what it loses on the way back."""

    protocol: str
    tool: str
    arguments: Callable[[str], Json] = lambda command: {"command": command}
    answer: Callable[[Client], str] = lambda client: ANSWER
    repairs: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()

    def call(self, command: str) -> str:
        body = json.dumps({"name": self.tool, "arguments": self.arguments(command)})
        return f"<tool_call>\n{body}\n</tool_call>"


def described(command: str) -> Json:
    return {"command": command, "description": "Run it"}


CLIENTS = {
    "openai_python": Client(protocol="chat", tool="shell"),
    "anthropic_python": Client(protocol="messages", tool="shell"),
    "openai_agents": Client(protocol="responses", tool="shell"),
    "langchain_agent": Client(protocol="chat", tool="shell", repairs=("reasoning_missing",)),
    "mini_swe_agent": Client(
        protocol="chat",
        tool="bash",
        # It ends with a command of its own, not with a text.
        answer=lambda client: client.call(f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {ANSWER}"),
    ),
    "claude_code": Client(protocol="messages", tool="Bash", arguments=described),
    "codex": Client(protocol="responses", tool="exec_command", arguments=lambda command: {"cmd": command}),
    "opencode": Client(protocol="chat", tool="bash", arguments=described, noise=("profile:env-date@1",)),
}


def rollout(tmp_path: Path, tokenizer: Path, name: str, lines: list[Json]) -> Json:
    """One session of a client against these script lines, exported with its reward; returns its document."""
    assert INSTALLED.exists(), f"{INSTALLED} is missing: install the clients with `bash scripts/install_harness.sh`"
    write_script(tmp_path / "script.jsonl", *lines)
    row = {"input": "Find the number with a shell command, then tell me.", "metadata": {"answer": "4242"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    done = run_silva(
        "rollout",
        *("--use-agentic-rollout", "--agent-command", f"exec bash {ROOT}/examples/harness/run.sh {name}"),
        *("--agent-retries", 0, "--agent-timeout", 300, "--prompt-data", "rows.jsonl", "--rollout-batch-size", 1),
        *("--num-rollout", 1, "--run-dir", "run", "--hf-checkpoint", tokenizer, "--engine", "scripted"),
        *("--engine-script", "script.jsonl", "--engine-log", "engine.jsonl"),
        *("--agentic-tool-call-parser", "auto", "--agentic-reasoning-parser", "auto"),
        cwd=tmp_path,
        timeout_s=350,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (item,) = show(tmp_path / "run")["sessions"]
    assert (item["status"], item["reward"]) == ("exported", 1.0)
    assert (tmp_path / "run" / "sessions" / item["session_id"] / "io" / "work" / "ran.txt").read_text() == "4242\n"
    assert marked_processes(tmp_path / "run") == []
    return show(tmp_path / "run", item["session_id"])


def play(tmp_path: Path, tokenizer: Path, name: str, turns: list[str]) -> Json:
    """A session as `rollout` makes it, checked to be one linear context of these turns."""
    session = rollout(tmp_path, tokenizer, name, [{"text": turn} for turn in turns])
    check_linear(session, CLIENTS[name].protocol, turns)
    check_tokens(session, tmp_path / "engine.jsonl")
    return session


def check_linear(session: Json, protocol: str, turns: list[str]) -> None:
    """One request a turn, each behind the one before; no side call, no branch."""
    requests, nodes = session["requests"], session["nodes"]
    assert [request["match"] for request in requests] == ["root"] + ["append"] * (len(turns) - 1)
    assert {(request["protocol"], request["http_status"]) for request in requests} == {(protocol, 200)}
    parents = [node["parent_id"] for node in nodes if node["parent_id"] is not None]
    assert len(set(parents)) == len(parents) == len(nodes) - 1, "a node with two children"
    results = [message for node in nodes for message in node["messages"] if message["role"] == "tool"]
    assert "4242" in results[0]["content"]


def check_tokens(session: Json, engine_log: Path) -> None:
    """The sample is what the engine saw and gave; all that was sampled is trained, nothing else."""
    (sample,) = session["samples"]
    calls = [json.loads(line) for line in engine_log.read_text().splitlines()]
    sampled = 0
    for call, request in zip(calls, session["requests"], strict=True):
        start, count = len(call["input_ids"]), request["usage"]["completion_tokens"]
        assert sample["token_ids"][:start] == call["input_ids"]
        assert sample["loss_mask"][start : start + count] == [1] * count
        sampled += count
    assert sum(sample["loss_mask"]) == sampled


@pytest.mark.parametrize("name", CLIENTS)
def test_a_shell_call_and_an_answer(tmp_path: Path, chatml_dir: Path, name: str) -> None:
    client = CLIENTS[name]
    session = play(tmp_path, chatml_dir, name, [client.call(RAN), client.answer(client)])
    assert [request["repairs"] for request in session["requests"]] == [list(client.noise)] * 2


@pytest.mark.parametrize("name", CLIENTS)
def test_four_turns_with_reasoning(tmp_path: Path, chatml_dir: Path, name: str) -> None:
    client = CLIENTS[name]
    turns = [
        "<think>\nFirst the number.\n</think>\n\n" + client.call(RAN),
        "<think>\nTwo at once.\n</think>\n\nI look twice.\n"
        + client.call("echo one")
        + "\n"
        + client.call("echo two >&2; false"),
        "<think>\nNothing to see.\n</think>\n\n" + client.call("true"),
        "<think>\nDone.\n</think>\n\n" + client.answer(client),
    ]
    session = play(tmp_path, chatml_dir, name, turns)
    assert [request["repairs"] for request in session["requests"]] == [
        list(client.noise),
        *[[*client.repairs, *client.noise]] * 3,
    ]
    assert [request["usage"]["reasoning_tokens"] > 0 for request in session["requests"]] == [True] * 4


@pytest.mark.parametrize("name", [name for name in CLIENTS if name != "anthropic_python"])  # its SDK ends on it
def test_a_turn_that_the_engine_could_not_serve_is_asked_for_again(tmp_path: Path, chatml_dir: Path, name: str) -> None:
    client = CLIENTS[name]
    faults: list[Json] = [{"error": "500"}] * 4
    lines = [{"text": client.call(RAN)}, *faults, {"text": client.answer(client)}]
    requests = rollout(tmp_path, chatml_dir, name, lines)["requests"]
    assert [request["http_status"] for request in requests] == [200, 503, 200]
    assert [request["match"] for request in requests] == ["root", "append", "append"]
