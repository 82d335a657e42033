"""Agents that send images: a rollout keeps them, training refuses them with a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pictures import data_uri, digest, png
from silva_command import AGENT, run_silva, show, write_rows, write_script

PICTURE = png()
REFERENCE = "media:sha256:" + digest(PICTURE)
LOOKS = (
    AGENT
    + f"""
picture = {{"type": "image_url", "image_url": {{"url": {data_uri(PICTURE)!r}}}}}
messages = [{{"role": "user", "content": [{{"type": "text", "text": "look: "}}, picture]}}]
ask(messages)
give({{"reward": 1.0}})
"""
)


def run(tmp_path: Path, command: str, model: Path, *more: object):
    (tmp_path / "agent.py").write_text(LOOKS)
    write_rows(tmp_path / "rows.jsonl", 2)
    write_script(tmp_path / "script.jsonl", {"text": "hello"})
    return run_silva(
        *(command, "--use-agentic-rollout", "--agent-command", "exec python3 -I agent.py", "--agent-retries", 0),
        *("--prompt-data", "rows.jsonl", "--rollout-batch-size", 1, "--num-rollout", 1, "--run-dir", command),
        *("--hf-checkpoint", model, *more),
        cwd=tmp_path,
    )


SCRIPTED = ("--engine", "scripted", "--engine-script", "script.jsonl")


@pytest.mark.slow
def test_a_rollout_keeps_images_and_shows_them_by_reference(tmp_path: Path, chatml_dir: Path) -> None:
    done = run(tmp_path, "rollout", chatml_dir, *SCRIPTED)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rollout/media" / digest(PICTURE)).read_bytes() == PICTURE
    (line,) = (tmp_path / "rollout/samples/0.jsonl").read_text().splitlines()
    assert json.loads(line)["images"] == [REFERENCE]
    session_id = json.loads(line)["session_id"]
    (message,) = show(tmp_path / "rollout", session_id)["nodes"][1]["messages"]
    assert message["content"] == [
        {"type": "text", "text": "look: "},
        {"type": "image_url", "image_url": {"url": REFERENCE}},
    ]
    assert REFERENCE in run_silva("show", "rollout", session_id, "--full", cwd=tmp_path).stdout
    assert data_uri(PICTURE)[30:].encode() not in (tmp_path / "rollout/run.db").read_bytes()


@pytest.mark.slow
def test_training_refuses_a_context_with_images(tmp_path: Path, chatml_dir: Path) -> None:
    """Also where no weights change: such a run collects what training would take."""
    more = ("--n-samples-per-prompt", 2, "--agent-max-failures", 2, "--debug-rollout-only")
    done = run(tmp_path, "train", chatml_dir, *more, *SCRIPTED)
    assert done.returncode == 1
    assert "images_not_trainable: the context to train on holds 1 image(s)" in done.stderr
    assert {item["reason"] for item in show(tmp_path / "train")["sessions"]} <= {"images_not_trainable", "run_stopped"}
