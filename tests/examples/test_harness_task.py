"""The ends of the launchers in examples/harness: the prompt out of a row, the reward out of an answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HARNESS = Path(__file__).parents[2] / "examples" / "harness"
ROW = {
    "messages": [{"role": "user", "content": "old"}, {"role": "user", "content": "count é"}],
    "metadata": {"answer": "42"},
}


def task(tmp_path: Path, row: dict[str, Any], *args: str) -> subprocess.CompletedProcess[bytes]:
    (tmp_path / "input.json").write_text(json.dumps(row))
    paths = {"RELAX_INPUT_JSON": f"{tmp_path}/input.json", "RELAX_OUTPUT_JSON": f"{tmp_path}/output.json"}
    command = [sys.executable, "-I", str(HARNESS / "task.py"), *args]
    return subprocess.run(command, env={**os.environ, **paths}, capture_output=True)


@pytest.mark.parametrize(("answer", "reward"), [("It is 42.", 1.0), ("It is 24.", 0.0), ("", 0.0)])
def test_the_answer_earns_its_reward(tmp_path: Path, answer: str, reward: float) -> None:
    assert task(tmp_path, ROW, "prompt").stdout == "count é".encode()
    (tmp_path / "answer.txt").write_text(answer)
    assert task(tmp_path, ROW, "reward", str(tmp_path / "answer.txt")).returncode == 0
    output = json.loads((tmp_path / "output.json").read_text())
    assert output == {"reward": reward, "metadata": {"answer_chars": len(answer)}}


@pytest.mark.parametrize(
    ("row", "verb", "word"),
    [({"metadata": {}}, "prompt", b"--input-key"), ({"messages": []}, "reward", b"metadata.answer")],
)
def test_a_row_without_task_or_answer_says_what_to_map(tmp_path: Path, row: dict[str, Any], verb: str, word: bytes):
    (tmp_path / "answer.txt").write_text("42")
    done = task(tmp_path, row, verb, *([str(tmp_path / "answer.txt")] if verb == "reward" else []))
    assert done.returncode == 1 and word in done.stderr


def test_a_launcher_without_its_clients_says_how_to_install_them(tmp_path: Path) -> None:
    env = {**os.environ, "SILVA_HARNESS_DIR": str(tmp_path)}
    done = subprocess.run(["bash", str(HARNESS / "run.sh"), "codex"], env=env, capture_output=True)
    assert done.returncode == 3 and b"scripts/install_harness.sh" in done.stderr
