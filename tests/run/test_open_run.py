"""The Python door: the same run as the command, from a running event loop, with parts of the caller's own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from silva_command import AGENT, TWO_TURNS, run_silva, write_rows
from tiny_model import build_tiny_model

import silva
from silva.agent.agent_runner import AgentRunner
from silva.codec import TurnCodec
from silva.inference.scripted import ScriptedEngine, ScriptLine
from silva.types.clock import Clock
from silva.types.errors import ConfigError
from silva.types.rollout import Mode

TIMES = ("perf/", "gateway/latency", "reward/latency")
"""Numbers that a clock decides."""


class Watcher:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.steps: list[tuple[str, int]] = []
        self.num_scored = 0

    def say(self, text: str) -> None:
        self.said.append(text)

    def begin_step(self, title: str, num_sessions: int) -> None:
        self.steps.append((title, num_sessions))

    def scored(self, mode: Mode) -> None:
        self.num_scored += 1


def options(folder: Path, model: Path) -> dict[str, object]:
    (folder / "agent.py").write_text(TWO_TURNS)
    return {
        "hf_checkpoint": str(model),
        "prompt_data": str(write_rows(folder / "rows.jsonl", 2)),
        "use_agentic_rollout": True,
        "agent_command": "exec python3 -I agent.py",
        "agent_cwd": str(folder),
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "num_rollout": 2,
        "rollout_max_response_len": 8,
        "lr": 0.01,
        "save_interval": 1,
    }


def lines(run_dir: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in found]


@pytest.mark.slow
async def test_training_from_a_running_loop_is_the_command(tmp_path: Path) -> None:
    """As in a notebook; uvloop and signals stay with the command."""
    values = options(tmp_path, build_tiny_model(tmp_path / "model"))
    watcher = Watcher()
    run = silva.open_run(values, run_dir=str(tmp_path / "here"), watcher=watcher)
    assert not (tmp_path / "here").exists(), "nothing starts before it is asked to"
    result = await run.train()
    assert (result.run_dir, result.num_steps) == (tmp_path / "here", 2)
    flags = [word for name, value in values.items() for word in _flag(name, value)]
    done = await asyncio.to_thread(run_silva, "train", *flags, "--run-dir", "there", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ours, theirs = lines(tmp_path / "here"), lines(tmp_path / "there")
    counters = (
        "engine/steps",
        "engine/decode",
        "engine/max",
        "gateway/",
        "engine/cached",
        "engine/copied",
        "engine/pre",
    )
    for mine, other in zip(ours, theirs, strict=True):
        alike = [name for name in mine if not name.startswith(counters)]
        assert {name: mine[name] for name in alike} == pytest.approx({name: other[name] for name in alike}, abs=1e-5)
    assert result.metrics["rollout/raw_reward"] == ours[-1]["rollout/raw_reward"]
    assert watcher.steps == [("train step 0", 4), ("train step 1", 4)] and watcher.num_scored == 8
    assert watcher.said[0] == f"run folder: {tmp_path / 'here'}" and "silva show" in watcher.said[-1]

    # the same door resumes: its own options, but for those that are given
    again = silva.open_run(resume=result.run_dir, num_rollout=3, watcher=watcher)
    assert again.config.lr == 0.01
    result = await again.train()
    assert result.num_steps == 3 and [line["step"] for line in lines(result.run_dir)] == [0, 1, 2]
    assert any("going on at step 2" in text for text in watcher.said)


def _flag(name: str, value: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    return [flag] if value is True else [flag, str(value)]


async def test_an_engine_and_a_runner_of_the_callers_own(tmp_path: Path, chatml_dir: Path) -> None:
    built: list[tuple[str, object]] = []

    def engine(config: silva.RunConfig, codec: TurnCodec, clock: Clock, *, hf_dir: Path, version: int = 0):
        built.append(("engine", (hf_dir, version)))
        return ScriptedEngine([ScriptLine(text="yes")], codec=codec, clock=clock)

    class Runner(AgentRunner):
        async def close(self) -> None:
            built.append(("closed", self.num_running))
            await super().close()

    def runner(*, run_id: str, grace_s: float, log_path: Path) -> silva.Runner:
        built.append(("runner", log_path))
        return Runner(run_id=run_id, grace_s=grace_s, log_path=log_path)

    values = options(tmp_path, chatml_dir) | {"run_dir": str(tmp_path / "run"), "num_rollout": 1}
    (tmp_path / "agent.py").write_text(AGENT + "give({'reward': float(ask(messages)['content'] == 'yes')})\n")
    result = await silva.open_run(values, engine_factory=engine, runner_factory=runner).rollout()
    assert built == [
        ("engine", (chatml_dir, 0)),
        ("runner", tmp_path / "run" / "runner.log"),
        ("closed", 0),
    ]
    assert result.num_steps == 1 and result.metrics["rollout/raw_reward"] == 1.0
    assert len((tmp_path / "run" / "samples" / "0.jsonl").read_text().splitlines()) == 4


async def test_a_server_ends_in_order_when_its_task_is_cancelled(tmp_path: Path, chatml_dir: Path) -> None:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    (tmp_path / "run.toml").write_text(f'hf_checkpoint = "{chatml_dir}"\nengine = "scripted"\nengine_script = "s"\n')
    script = tmp_path / "script.jsonl"
    script.write_text('{"text": "ok"}\n')
    run = silva.open_run(tmp_path / "run.toml", engine_script=str(script), run_dir=str(tmp_path / "run"))
    task = asyncio.create_task(run.serve(ready=ready.set_result))
    host, port = (await asyncio.wait_for(ready, 60)).split("//")[1].split("/")[0].split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.close()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(OSError):
        await asyncio.open_connection(host, int(port))


def test_options_come_in_any_form_and_the_nearest_wins(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("lr = 0.5\nseed = 3\n")
    for config in (tmp_path / "run.toml", str(tmp_path / "run.toml"), {"lr": 0.5, "seed": 3}):
        found = silva.open_run(config, seed=4).config
        assert (found.lr, found.seed) == (0.5, 4)
    given = silva.RunConfig(lr=0.5, seed=3)
    assert silva.open_run(given).config.seed == 3 and silva.open_run(given, seed=4).config.lr == 0.5
    assert silva.open_run(run_dir="x").run_dir == Path("x").absolute()
    assert not Path("x").exists()
    for wrong in ({"sed": 3}, {"config": {"sed": 3}}):
        with pytest.raises(ConfigError, match="unknown option 'sed'; did you mean seed"):
            silva.open_run(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no run in this folder"):
        silva.open_run(resume=tmp_path)


def test_importing_silva_loads_nothing_heavy() -> None:
    heavy = "torch", "transformers", "numpy", "aiohttp", "msgspec"
    code = f"import sys, silva; print([name for name in {heavy} if name in sys.modules])"
    started_s = time.monotonic()
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]" and time.monotonic() - started_s < 5
    assert {silva.open_run.__module__, silva.Run.__module__} == {"silva.run.run"}
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        silva.Trainer  # type: ignore[attr-defined]  # noqa: B018
