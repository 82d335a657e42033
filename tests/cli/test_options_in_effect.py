"""Options that show in what the engine is asked, in what runs at once, and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest
from silva_command import AGENT, SILVA, run_silva, show, write_rows, write_script

from silva.config.parse import from_values
from silva.run.parts import check_row_budget
from silva.run.settings import eval_concurrency
from silva.types.errors import ConfigError

ONE_TURN = AGENT + "ask(messages); give({'reward': n % 2})\n"
ALONE = AGENT + (
    "os.mkdir('lock')\n"  # fails where another agent runs
    "ask(messages); time.sleep(0.05)\n"
    "os.rmdir('lock'); give({'reward': 1.0})\n"
)


def command(tmp_path: Path, name: str, model: Path, agent: str, *more: object, rows: int = 4) -> tuple[object, ...]:
    (tmp_path / "agent.py").write_text(agent)
    write_rows(tmp_path / "rows.jsonl", rows)
    write_script(tmp_path / "script.jsonl", {"text": "hello world"})
    return (
        *(name, "--use-agentic-rollout", "--agent-command", "exec python3 -I agent.py", "--hf-checkpoint", model),
        *("--prompt-data", "rows.jsonl", "--run-dir", "run", "--num-rollout", 1, "--agent-retries", 0),
        *("--engine", "scripted", "--engine-script", "script.jsonl", "--engine-log", "engine.jsonl", *more),
    )


def sampling(tmp_path: Path, mode: str) -> list[dict]:
    """What the engine was asked for by sessions of a mode."""
    modes = {item["session_id"]: item["mode"] for item in show(tmp_path / "run")["sessions"]}
    calls = [json.loads(line) for line in (tmp_path / "engine.jsonl").read_text().splitlines()]
    return [call["sampling_params"] for call in calls if modes[call["session_id"]] == mode]


@pytest.mark.slow
def test_training_and_eval_sample_as_their_options_say(tmp_path: Path, chatml_dir: Path) -> None:
    write_rows(tmp_path / "eval.jsonl", 2)
    words = command(
        *(tmp_path, "train", chatml_dir, ONE_TURN, "--rollout-batch-size", 2, "--n-samples-per-prompt", 2),
        "--debug-rollout-only",
        *("--rollout-temperature", 0.5, "--rollout-top-p", 0.8, "--rollout-top-k", 7, "--rollout-stop", "END"),
        *("--rollout-stop-token-ids", 9, "--rollout-max-response-len", 20, "--eval-interval", 1),
        *("--eval-prompt-data", "held", "eval.jsonl", "--n-samples-per-eval-prompt", 3, "--eval-temperature", 0),
        *("--eval-top-p", 1, "--eval-max-response-len", 5),
    )
    done = run_silva(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    train, held_out = sampling(tmp_path, "train"), sampling(tmp_path, "eval")
    assert (len(train), len(held_out)) == (2 * 2, 2 * (2 * 3))
    for params in train:
        assert (params["temperature"], params["top_p"], params["top_k"]) == (0.5, 0.8, 7)
        assert (params["stop"], params["max_new_tokens"]) == (["END"], 20) and 9 in params["stop_token_ids"]
    for params in held_out:
        assert (params["temperature"], params["top_p"], params["top_k"]) == (0.0, 1.0, 7)
        assert (params["stop"], params["max_new_tokens"]) == (["END"], 5)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["eval/held/reward"] for line in lines if "eval/held/reward" in line] == [0.5, 0.5]


@pytest.mark.slow
def test_no_more_groups_are_resident_than_asked_for(tmp_path: Path, chatml_dir: Path) -> None:
    more = ("--rollout-batch-size", 4, "--agentic-concurrency", 1)
    done = run_silva(*command(tmp_path, "rollout", chatml_dir, ALONE, *more), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert show(tmp_path / "run")["counts"]["sessions"] == {"exported": {"none": 4}}


def test_eval_holds_as_many_sessions_as_training_unless_told_otherwise() -> None:
    values = {"rollout_batch_size": 5, "n_samples_per_prompt": 4, "n_samples_per_eval_prompt": 3}
    assert eval_concurrency(from_values(values)) == 7  # ceil(5 * 4 / 3)
    assert eval_concurrency(from_values({**values, "agentic_concurrency": 2})) == 3
    assert eval_concurrency(from_values({**values, "agentic_eval_concurrency": 11})) == 11


def test_rows_must_hold_the_longest_context_of_the_model(tmp_path: Path, model_dir: Path) -> None:
    limit = json.loads((model_dir / "config.json").read_text())["max_position_embeddings"]
    values = {"hf_checkpoint": str(model_dir), "use_dynamic_batch_size": True, "max_tokens_per_gpu": limit}
    check_row_budget(from_values(values))
    check_row_budget(from_values({**values, "max_tokens_per_gpu": 9, "rollout_max_context_len": 9}))
    with pytest.raises(ConfigError, match=rf"--max-tokens-per-gpu {limit - 1} is less than the {limit} tokens"):
        check_row_budget(from_values({**values, "max_tokens_per_gpu": limit - 1}))


@pytest.mark.slow
def test_a_terminal_shows_how_many_sessions_are_scored(tmp_path: Path, chatml_dir: Path) -> None:
    words = command(tmp_path, "rollout", chatml_dir, ONE_TURN, "--rollout-batch-size", 4)
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(
        [str(SILVA), *map(str, words)], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=theirs, env=env
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while chunk := os.read(ours, 65536):
                shown += chunk
        except OSError:
            pass  # the last writer is gone
        os.close(ours)
    assert process.returncode == 0, shown
    assert b"train step 0" in shown and b"scored 0/4" in shown and b"scored 4/4" in shown
