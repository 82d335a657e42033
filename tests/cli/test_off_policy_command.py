"""Corrections through `silva train` on recorded rollouts, with a function of the user in its worker."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_dump import write_dump
from train_tiny import make_sample, write_least_model

from silva.cli.main import main
from silva.config.parse import from_values
from silva.run.user_code import UserCode, open_user_code
from silva.types.generation import VersionSpan
from silva.types.rollout import TrainingSample

MINE = """
import math

def weigh(args, old_logprobs, rollout_logprobs):
    assert args.use_tis and args.custom_tis_function_path == "mine.weigh"
    assert all(isinstance(value, float) for value in old_logprobs + rollout_logprobs)
    if rollout_logprobs[0] == -7.0:
        raise RuntimeError("no weights for this")
    print("weighing", len(old_logprobs))
    return [min(1.0, math.exp(a - b)) for a, b in zip(old_logprobs, rollout_logprobs, strict=True)]

def broken(args, old_logprobs, rollout_logprobs):
    return [1.0]

def narrow(old_logprobs, rollout_logprobs):
    return rollout_logprobs
"""


def sample(session: str, reward: float, first: float, version: int) -> TrainingSample:
    """Two trainable tokens, both of weight version 0 in front, `version` behind."""
    made = make_sample(session, [3, 4, 5, 6], [0, 1, 1, 1], credit=None, logprobs=[0.0, first, -3.0, -3.0])
    spans = [VersionSpan(start=0, length=1, version=-1), VersionSpan(start=1, length=1, version=0)]
    return replace(made, reward=reward, version_spans=(*spans, VersionSpan(start=2, length=2, version=version)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_least_model(tmp_path / "model")
    (tmp_path / "mine.py").write_text(MINE)
    for step in range(2):
        ids = ("a", "b", "c")
        rewards, firsts = (1.0, 0.0, 0.5), (-3.0, -3.0, -7.0)
        made = [sample(f"s{step}{x}", r, first, step) for x, r, first in zip(ids, rewards, firsts, strict=True)]
        write_dump(tmp_path / "dumps" / f"{step}.jsonl", [made])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(function: str, *more: str) -> list[str]:
    records = ["--load-debug-rollout-data", "dumps/{rollout_id}.jsonl", "--hf-checkpoint", "model", "--lr", "0.01"]
    return [*records, "--use-tis", "--custom-tis-function-path", function, *more]


def test_a_function_weighs_the_fresh_tokens_of_each_sequence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = command(
        "mine.weigh", "--run-dir", "run", "--max-token-staleness", "0", "--rollout-top-p", "0.9", "--use-kl-loss"
    )
    assert main(["train", *words]) == 0
    first, second = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    # in the second step the stale token, with the log-prob that is refused, is no longer among those that are weighed
    assert (first["train/custom_tis_failed"], first["train/stale_tokens"]) == (1, 0)
    assert first["train/tis_clipfrac"] == pytest.approx(1 / 3) and 0 < first["train/tis"] < 1
    assert (second["train/custom_tis_failed"], second["train/stale_tokens"]) == (0, 3)
    log = (folder / "run" / "run.log").read_text()
    assert log.count("--use-tis with --rollout-top-p 0.9: tokens were drawn") == 1
    assert "session s0c: its policy loss is left out" in log and "RuntimeError: no weights for this" in log
    assert "weighing 3" in (folder / "run" / "user_code.log").read_text()
    told = capsys.readouterr()
    assert (
        told.err.count("--use-tis with --rollout-top-p 0.9") == 1 and told.err.count("is measured, but not in the") == 1
    )
    (line,) = [line for line in told.out.splitlines() if line.startswith("step 1: ")]
    shown = {"loss": "loss", "grad norm": "grad_norm", "kl loss": "kl_loss", "tis": "tis"}
    said = "".join(f"  {label} {second['train/' + name]:.4f}" for label, name in shown.items())
    assert line.startswith(f"step 1: reward 0.500{said}  sessions 3  ")


def test_a_function_that_never_works_stops_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *command("mine.broken", "--run-dir", "run")]) == 1
    told = capsys.readouterr().err
    assert "--custom-tis-function-path gave no weights for any of the 3 sequences of this step" in told
    assert told.count("mine.broken returned 1 weights for a sequence of 3 trainable tokens") == 1


def test_a_function_that_cannot_be_called_is_seen_at_the_start(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *command("mine.narrow", "--run-dir", "run")]) == 2
    assert "--custom-tis-function-path mine.narrow: it is called with (args, old_logprobs," in capsys.readouterr().err
    assert main(["check", *command("mine.weigh", "--rollout-top-k", "5")]) == 1  # this model folder has no tokenizer
    shown = capsys.readouterr().out
    assert "PASS your functions: loaded mine.weigh (weights; not called by this check)" in shown
    assert "WARN options: --use-tis with --rollout-top-k 5" in shown


def test_what_does_not_train_does_not_load_it(tmp_path: Path) -> None:
    async def opened() -> UserCode:
        async with AsyncExitStack() as stack:
            config = from_values({"use_tis": True, "custom_tis_function_path": "nowhere.at_all"})
            return await open_user_code(config, tmp_path, "run-x", stack)

    assert asyncio.run(opened()) == UserCode()
