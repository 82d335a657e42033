"""`silva serve` and `silva check` through the real door."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest
from silva_command import (
    TWO_TURNS,
    eventually,
    in_process,
    run_silva,
    running_silva,
    show,
    stop,
    write_rows,
    write_script,
)


def finish_by_name(base: str, session_id: str) -> None:
    """Hold two conversations in one session and export both, the later one first."""
    client = openai.OpenAI(base_url=base, api_key=session_id)
    records: list[dict] = []
    for name in ("a", "b"):
        messages: list = [{"role": "user", "content": name}]
        reply = client.chat.completions.create(model="m", messages=messages)
        records.insert(0, {"name": name, "messages": [*messages, reply.choices[0].message.model_dump()]})
    records[0]["reward"] = {"score": 2, "tests": 7}
    answer = httpx.post(f"{base}/sessions/{session_id}/finish", content="\n".join(map(json.dumps, records)))
    assert answer.json() == {"status": "exported", "reason": None, "num_samples": 2}


@pytest.mark.slow
def test_serve_records_open_sessions(tmp_path: Path, chatml_dir: Path) -> None:
    write_script(
        tmp_path / "script.jsonl", {"text": "one"}, {"text": "two", "finish_reason": "length"}, {"text": "three"}
    )
    command = (
        "serve",
        "--open-sessions",
        "--run-dir",
        "run",
        "--engine",
        "scripted",
        "--engine-script",
        "script.jsonl",
        "--reward-key",
        "score",
    )
    with running_silva(*command, "--hf-checkpoint", chatml_dir, "--engine-log", "log", cwd=tmp_path) as process:
        found = eventually(lambda: re.search(r"ready base_url=(\S+)", (tmp_path / "stdout").read_text()))
        base = found.group(1)
        client = openai.OpenAI(base_url=base, api_key="s1", max_retries=0)
        messages: list = [{"role": "user", "content": "hi"}]
        for turn in range(3):
            reply = client.chat.completions.create(model="m", messages=messages)
            messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": f"next {turn}"}]
        live = eventually(lambda: show(tmp_path / "run")["sessions"])  # records are written behind the answers
        assert [(item["session_id"], item["status"]) for item in live] == [("s1", "running")]
        answer = httpx.post(f"{base}/sessions/s1/finish", json={"reward": 0.5, "metadata": {"k": 1}})
        assert answer.status_code == 200
        assert answer.json() == {"status": "exported", "reason": None, "num_samples": 1}
        late = httpx.post(f"{base}/v1/chat/completions", json={"messages": messages}, headers={"x-api-key": "s1"})
        assert late.status_code == 404 and late.headers["x-should-retry"] == "false"
        empty = httpx.post(f"{base}/sessions/s2/finish")
        assert empty.status_code == 404
        openai.OpenAI(base_url=base, api_key="s2").chat.completions.create(model="m", messages=messages[:1])
        broken = httpx.post(f"{base}/sessions/s2/finish", content=b'{"reward": ')
        assert broken.status_code == 200 and "line 1" in broken.json()["message"]
        assert {**broken.json(), "message": ""} == {
            "status": "failed",
            "reason": "output_invalid",
            "num_samples": 0,
            "message": "",
        }
        finish_by_name(base, "s4")
        openai.OpenAI(base_url=base, api_key="s3").chat.completions.create(model="m", messages=messages[:1])
        assert stop(process, signal.SIGTERM) == 0
    document = show(tmp_path / "run")
    assert document["counts"]["sessions"] == {
        "cancelled": {"serve_stopped": 1},
        "exported": {"none": 2},
        "failed": {"output_invalid": 1},
    }
    assert show(tmp_path / "run", "s2")["reason"] == "output_invalid"
    samples = [(s["name"], s["reward"]) for s in show(tmp_path / "run", "s4")["samples"]]
    assert samples == [("b", 2.0), ("a", None)]
    session = show(tmp_path / "run", "s1")
    assert session["reward"] == 0.5 and session["metadata"] == {"k": 1}
    assert [request["match"] for request in session["requests"]] == ["root", "append", "append"]
    calls = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    tokens = session["samples"][0]["token_ids"]
    assert all(tokens[: len(call["input_ids"])] == call["input_ids"] for call in calls if call["session_id"] == "s1")


@pytest.mark.slow
def test_serve_refuses_what_it_cannot_do(tmp_path: Path, chatml_dir: Path) -> None:
    write_script(tmp_path / "script.jsonl", {"text": "x"})
    base = ("serve", "--engine", "scripted", "--engine-script", "script.jsonl", "--hf-checkpoint", chatml_dir)
    assert run_silva(*base, cwd=tmp_path).returncode == 2
    base = tuple(tmp_path / word if word == "script.jsonl" else word for word in base)
    away = in_process(*base, "--open-sessions", "--gateway-host", "0.0.0.0")
    assert away.returncode == 2 and "loopback" in away.stderr
    (tmp_path / "script.jsonl").write_text('{"text": "x"}\n{"txt": 1}\n')
    wrong = run_silva(*base, "--open-sessions", "--run-dir", "run", cwd=tmp_path)
    assert wrong.returncode == 2 and "line 2" in wrong.stderr


def check(tmp_path: Path, model: Path, *more: object):
    return run_silva(
        *("check", "--use-agentic-rollout", "--agent-command", "exec python3 -I agent.py", "--hf-checkpoint", model),
        *("--prompt-data", "rows.jsonl", "--rollout-batch-size", 2, "--n-samples-per-prompt", 2, "--num-rollout", 1),
        *more,
        cwd=tmp_path,
    )


@pytest.mark.slow
def test_check_passes_a_run_that_fits(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "agent.py").write_text(TWO_TURNS)
    write_rows(tmp_path / "rows.jsonl", 3)
    more = ("--advantage-estimator", "ppo", "--n-samples-per-prompt", 1)  # which compares no sessions
    parsers = ("--agentic-tool-call-parser", "auto", "--agentic-reasoning-parser", "qwen3")
    done = check(tmp_path, model_dir, *parsers, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.findall(r"^PASS ([a-z ]+)", done.stdout, re.M)
    assert passed == ["options", "dataset", "chat template", "parsers", "model", "agent command"]
    assert "PASS options: fit for silva train" in done.stdout
    assert "PASS parsers: tool calls hermes, reasoning qwen3\n" in done.stdout
    assert "model turns: 2" in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_check_names_what_is_wrong(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "agent.py").write_text("print('no such tool'); raise SystemExit(5)")
    write_rows(tmp_path / "rows.jsonl", 3)
    done = check(tmp_path, model_dir)
    assert done.returncode == 1
    assert re.search(r"^FAIL agent command: agent_exit: .*exit status 5", done.stdout, re.M), done.stdout
    assert "no such tool" in done.stdout
    done = check(tmp_path, model_dir, "--rollout-max-context-len", 4096, "--no-agent-run")
    assert re.search(r"^FAIL model: --rollout-max-context-len is 4096", done.stdout, re.M), done.stdout
    (tmp_path / "rows.jsonl").write_text("{\n")
    # names its class, so that none has to be looked for (which would load torch)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    done = check(tmp_path, tmp_path, "--n-samples-per-prompt", 1, "--global-batch-size", 5)
    failed = re.findall(r"^FAIL ([a-z ]+)", done.stdout, re.M)
    assert done.returncode == 1 and failed == ["options", "dataset", "chat template", "model"], done.stdout


def test_gateway_forest_and_runner_work_without_torch(tmp_path: Path) -> None:
    parts = (
        "agent.agent_runner processes.runner gateway.server inference.scripted rollout.group_runner run.assembly codec "
        "store.ledger"
    )
    code = f"""
import importlib, sys
sys.modules["torch"] = None  # any import of it fails
for name in "{parts}".split():
    importlib.import_module("silva." + name)
"""
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert seen.returncode == 0, seen.stderr


def test_importing_silva_is_light(tmp_path: Path) -> None:
    code = (
        "import sys, silva, silva.cli; print(sorted(m for m in ('torch', 'transformers', 'numpy') if m in sys.modules))"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "[]"
