"""`silva train` and `silva train --resume`: a real tiny model, real agents, real gradient steps."""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
from pathlib import Path

import pytest
from silva_command import (
    AGENT,
    TWO_TURNS,
    eventually,
    in_process,
    marked_processes,
    run_silva,
    runner_pid,
    running_silva,
    show,
    stop,
    write_rows,
    write_script,
)

from silva.store.queries import check_ledgers, open_run


def options(model: Path, *more: object, rollouts: int = 2) -> tuple[object, ...]:
    return (
        *("train", "--use-agentic-rollout", "--agent-command", "exec python3 -I agent.py", "--hf-checkpoint", model),
        *("--prompt-data", "rows.jsonl", "--rollout-batch-size", 2, "--n-samples-per-prompt", 3, "--lr", 0.001),
        *("--num-rollout", rollouts, "--micro-batch-size", 8, "--rollout-max-response-len", 8, "--run-dir", "run"),
        *more,
    )


PROMISED = {
    *("rollout/raw_reward", "rollout/truncated_ratio", "ledger/trained", "forest/root", "forest/append"),
    *(f"rollout/{name}/{of}" for name in ("response_len", "num_turn") for of in ("mean", "median", "max", "min")),
    *(f"train/{name}" for name in ("loss", "pg_loss", "entropy", "ppo_kl", "pg_clipfrac", "grad_norm", "lr")),
    *("train/rollout_logprob_abs_diff", "staleness/mean", "staleness/max"),
    *("gateway/requests", "gateway/wait_s", "gateway/latency_s"),
    *(f"perf/{name}" for name in ("step_s", "rollout_s", "train_s", "tokens_per_s", "engine_busy")),
}
"""Names that others read: they stay."""


def prepare(tmp_path: Path, agent: str, rows: int = 8) -> None:
    (tmp_path / "agent.py").write_text(agent)
    write_rows(tmp_path / "rows.jsonl", rows)


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def trained_rows(run_dir: Path) -> list[int]:
    with sqlite3.connect(run_dir / "run.db") as conn:
        rows = conn.execute("SELECT row FROM prompts WHERE state = 'trained' AND mode = 'train' ORDER BY row")
        return [row for (row,) in rows]


def hangs_from(row: int) -> str:
    """Two turns; from this row on every agent hangs behind its first one, with children that are hard to end."""
    hang = f"""
import subprocess
if n >= {row} and not os.path.exists("released"):
    subprocess.Popen(["setsid", "sleep", "600"])
    subprocess.Popen("(trap '' TERM; sleep 600) &", shell=True)
    ask(messages)
    open(f"hanging-{{os.getpid()}}", "w").close()
    time.sleep(600)
"""
    return AGENT + hang + TWO_TURNS.removeprefix(AGENT)


def all_hang(tmp_path: Path) -> None:
    eventually(lambda: len(list(tmp_path.glob("hanging-*"))) == 6)


@pytest.mark.slow
def test_train_eval_save_kill_nine_in_mid_step_and_resume(tmp_path: Path, model_dir: Path) -> None:
    """Three lives of one run: two whole steps; one step more and a kill in the next; the rest."""
    import torch
    from transformers import AutoModelForCausalLM

    prepare(tmp_path, hangs_from(6))
    write_rows(tmp_path / "eval.jsonl", 3)
    more = ("--eval-interval", 2, "--eval-prompt-data", "held", "eval.jsonl", "--save-interval", 1, "--save-hf", "out")
    more += ("--rollout-temperature", 0.7, "--rollout-top-p", 0.9, "--warmup", 2, "--agent-retries", 0)
    done = run_silva(*options(model_dir, *more), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "eval held before step 0: reward" in done.stdout and "eval held at the end: reward" in done.stdout
    steps = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert [line["step"] for line in steps] == [0, 1]
    # What the engine recorded is what the trainer computes, also after an update of the weights.
    assert all(line["train/rollout_logprob_abs_diff"] < 1e-3 for line in steps)
    assert all(line["train/grad_norm"] > 0 for line in steps)
    assert all(line.keys() >= PROMISED for line in steps)
    assert all(0 < line["perf/engine_busy"] <= 1 and line["gateway/requests"] == 12 for line in steps)
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step_000001", "step_000002"]

    start = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step_000002").state_dict()
    assert any(not torch.equal(start[name], saved[name]) for name in start)
    assert all(torch.equal(last[name], saved[name]) for name in last)

    packing = ("--micro-batch-size", 1, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 512)
    course = ("--lr-schedule", "cosine", "--min-lr", 0.0002)
    more = ("--num-rollout", 4, "--num-steps-per-rollout", 2, *packing, *course)
    with running_silva("train", "--resume", "run", *more, cwd=tmp_path) as process:
        all_hang(tmp_path)
        assert stop(process, signal.SIGKILL) == -signal.SIGKILL
        assert "going on at step 2" in (tmp_path / "stdout").read_text()
    eventually(lambda: marked_processes(tmp_path / "run") == [])
    (tmp_path / "released").touch()
    done = run_silva("train", "--resume", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "going on at step 3" in done.stdout and marked_processes(tmp_path / "run") == []
    state = torch.load(tmp_path / "run/checkpoints/step_000004/optimizer.pt", weights_only=True)
    assert state["num_updates"] == 2 + 2 * 2
    steps = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert [line["step"] for line in steps] == [0, 1, 2, 3]
    # two steps of warm-up, then the cosine at 0 and 1/4 (mean of two optimizer steps), at 1/2 and 3/4
    falls = [0.0006 + 0.0004 * math.cos(math.pi * share) for share in (0, 0.25, 0.5, 0.75)]
    rates = [0.0005, 0.001, sum(falls[:2]) / 2, sum(falls[2:]) / 2]
    assert [line["train/lr"] for line in steps] == pytest.approx(rates)
    assert trained_rows(tmp_path / "run") == list(range(8))
    assert show(tmp_path / "run")["counts"]["prompts"] == {"trained": {"none": 8}}
    assert show(tmp_path / "run")["counts"]["sessions"] == {
        "exported": {"none": 24},
        "cancelled": {"interrupted": 6},
    }
    versions = set()
    for item in show(tmp_path / "run")["sessions"]:
        for node in show_nodes(tmp_path / "run", item["session_id"]):
            versions |= {span[2] for span in node["weight_spans"] if span[2] >= 0}
    assert versions == {0, 1, 2, 3, 4}
    with open_run(tmp_path / "run") as conn:
        check_ledgers(conn, finished=True)


PPO = ("--advantage-estimator", "ppo", "--critic-lr", 0.01, "--num-critic-only-steps", 1)


def replay(tmp_path: Path, model_dir: Path) -> list[dict]:
    """Train on what the run recorded: no data, no agent, and the same options of training."""
    done = run_silva(
        *("train", "--debug-train-only", "--load-debug-rollout-data", "{rollout_id}.jsonl", "--hf-checkpoint"),
        *(model_dir, "--lr", 0.001, "--micro-batch-size", 8, "--run-dir", "replayed"),
        *("--log-passrate", *PPO),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "replayed" / "run.db").exists()
    return metrics(tmp_path / "replayed")


def show_nodes(run_dir: Path, session_id: str) -> list[dict]:
    from silva.store.documents import show_session

    return show_session(run_dir, session_id)["nodes"]


@pytest.mark.slow
def test_kill_nine_of_the_runner_in_mid_step(tmp_path: Path, chatml_dir: Path) -> None:
    """The lost sessions are run again under a new runner: no agent of theirs failed."""
    prepare(tmp_path, hangs_from(2), rows=4)
    write_script(tmp_path / "script.jsonl", {"text": "hello world"})
    scripted = ("--debug-rollout-only", "--engine", "scripted", "--engine-script", "script.jsonl")
    command = options(chatml_dir, *scripted, "--agent-retries", 0)
    with running_silva(*command, cwd=tmp_path) as process:
        all_hang(tmp_path)
        (tmp_path / "released").touch()
        os.kill(eventually(lambda: runner_pid(process)), signal.SIGKILL)
        assert process.wait(timeout=90) == 0
    assert marked_processes(tmp_path / "run") == []
    with open_run(tmp_path / "run") as conn:
        check_ledgers(conn, finished=True)
    counts = show(tmp_path / "run")["counts"]
    assert counts["prompts"] == {"delivered": {"none": 4}}
    assert counts["sessions"] == {"exported": {"none": 12}, "failed": {"runner_lost": 6}}


@pytest.mark.slow
def test_term_ends_a_run_in_order_and_resume_needs_its_data(tmp_path: Path, model_dir: Path) -> None:
    prepare(tmp_path, hangs_from(2), rows=4)
    with running_silva(*options(model_dir), cwd=tmp_path) as process:
        all_hang(tmp_path)
        assert stop(process) == 128 + signal.SIGTERM
    assert "starts over, since no checkpoint was written" in (tmp_path / "stderr").read_text()
    assert marked_processes(tmp_path / "run") == []
    assert show(tmp_path / "run")["counts"]["sessions"] == {
        "exported": {"none": 6},
        "cancelled": {"run_stopped": 6},
    }
    with open_run(tmp_path / "run") as conn:
        check_ledgers(conn, finished=True)
    write_rows(tmp_path / "rows.jsonl", 2)
    done = run_silva("train", "--resume", "run", cwd=tmp_path)
    assert done.returncode == 2 and "Resume with the same" in done.stderr


@pytest.mark.slow
def test_failed_groups_are_replaced_and_the_last_step_of_the_epochs_may_be_smaller(
    tmp_path: Path, model_dir: Path
) -> None:
    prepare(tmp_path, AGENT + "if n in (0, 3): sys.exit(3)\n" + TWO_TURNS.removeprefix(AGENT), rows=5)
    more = ("--agent-retries", 0, "--num-epoch", 1, "--save-debug-rollout-data", "{rollout_id}.jsonl", "--log-passrate")
    done = run_silva(*options(model_dir, *more, *PPO, rollouts=9), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert trained_rows(tmp_path / "run") == [1, 2, 4]
    first, second = [line for line in done.stdout.splitlines() if line.startswith("step")]
    assert "skipped: critic_only" in first and "value loss" in second and "skipped" not in second
    assert show(tmp_path / "run")["counts"]["prompts"]["dropped"] == {"all_sessions_failed": 2}
    steps, replayed = metrics(tmp_path / "run"), replay(tmp_path, model_dir)
    assert [line["rollout/num_groups"] for line in steps] == [2, 1]
    assert [line["step"] for line in replayed] == [0, 1]
    for before, after in zip(steps, replayed, strict=True):
        learned = {name for name in before if name.startswith(("train/", "rollout/", "letters/", "staleness/"))}
        learned = {name for name in learned if "start_lag" not in name}  # of groups that ran, not of recorded ones
        assert {"train/loss", "train/grad_norm", "rollout/passrate/pass@3", "letters/mean"} < learned
        assert {"train/value_loss", "train/critic_grad_norm", "train/return_mean"} < learned
        assert {name: after[name] for name in learned} == pytest.approx(
            {name: before[name] for name in learned}, abs=1e-6
        )


def test_resume_needs_a_run(tmp_path: Path) -> None:
    done = in_process("train", "--resume", tmp_path / "nowhere")
    assert done.returncode == 2 and "nowhere" in done.stderr


@pytest.mark.slow
def test_a_rollout_run_cannot_be_resumed_nor_its_folder_used_again(tmp_path: Path, chatml_dir: Path) -> None:
    prepare(tmp_path, TWO_TURNS, rows=2)
    write_script(tmp_path / "script.jsonl", {"text": "hello world"})
    scripted = ("--engine", "scripted", "--engine-script", "script.jsonl")
    command = ("rollout", *options(chatml_dir, *scripted, rollouts=1)[1:])
    done = run_silva(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = run_silva(*command, cwd=tmp_path)
    assert again.returncode == 1 and "--resume" in again.stderr
    resumed = in_process("train", "--resume", tmp_path / "run")
    assert resumed.returncode == 2 and "cannot be resumed" in resumed.stderr
