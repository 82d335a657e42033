"""`--engine sglang` on the command line, against a stub server in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sglang_stub
from silva_command import TWO_TURNS, run_silva, show, write_rows

from silva.codec import TurnCodec


@pytest.fixture
def server(codec: TurnCodec) -> Iterator[str]:
    """The address of a server that answers each request with the same seven ids and the end of the turn."""
    command = [sys.executable, sglang_stub.__file__, "--tokens", "8", "--end-id", str(codec.end_of_turn_id())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stub:
        assert stub.stdout is not None
        yield f"http://127.0.0.1:{stub.stdout.readline().strip()}"
        stub.kill()


def silva(command: str, tmp_path: Path, tokenizer: Path, url: str, *more: object):
    (tmp_path / "agent.py").write_text(TWO_TURNS)
    write_rows(tmp_path / "rows.jsonl", 2)
    return run_silva(
        *(command, "--use-agentic-rollout", "--agent-command", "exec python3 -I agent.py", "--num-rollout", 1),
        *("--prompt-data", "rows.jsonl", "--rollout-batch-size", 2, "--n-samples-per-prompt", 2),
        *("--engine", "sglang", "--engine-url", url, "--hf-checkpoint", tokenizer, *more),
        cwd=tmp_path,
    )


@pytest.mark.slow
def test_rollout_records_what_the_server_sampled(
    tmp_path: Path, chatml_dir: Path, codec: TurnCodec, server: str
) -> None:
    done = silva("rollout", tmp_path, chatml_dir, server, "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    document = show(tmp_path / "run")
    assert document["counts"]["sessions"] == {"exported": {"none": 4}}
    sample = show(tmp_path / "run", document["sessions"][0]["session_id"])["samples"][0]
    answer = [*range(40, 47), codec.end_of_turn_id()]
    on = [token for token, mask in zip(sample["token_ids"], sample["loss_mask"], strict=True) if mask]
    assert on == [*answer, *answer]


@pytest.mark.slow
def test_check_looks_at_the_server(tmp_path: Path, chatml_dir: Path, server: str) -> None:
    done = silva("check", tmp_path, chatml_dir, server, "--no-agent-run")
    assert done.returncode == 0, done.stdout
    assert re.search(r"^PASS options: fit for silva rollout \(silva train needs another --engine\)", done.stdout, re.M)
    assert re.search(rf"^PASS engine: {server}: weight version 0, context 1048576 tokens", done.stdout, re.M)
