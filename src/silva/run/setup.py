"""What a run is made of before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from silva.config import RunConfig
from silva.run.factories import EngineFactory, RunnerFactory
from silva.run.watcher import LogWatcher, RunWatcher


@dataclass(kw_only=True)
class RunSetup:
    """The options of a run, its folder, and what its caller replaces."""

    config: RunConfig
    """The options in force; `config.run_dir` names the folder."""
    run_dir: Path
    """The run's folder, absolute. It is made when the run starts."""
    resumed: bool
    """The run continues in the folder of one that stopped."""
    engine_factory: EngineFactory
    """Builds the engine."""
    runner_factory: RunnerFactory
    """Builds what owns the agent processes."""
    watcher: RunWatcher = field(default_factory=LogWatcher)
    """Receives results and progress. May be exchanged until the run starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What a run that ended well leaves.

    Example: `RunResult(run_dir=Path("/work/runs/a"), num_steps=2, metrics={"rollout/raw_reward": 0.5, ...})`
    """

    run_dir: Path
    """The run's folder: ledger, metrics, samples, checkpoints."""
    num_steps: int
    """Rollout steps done in all, those before a resume included."""
    metrics: dict[str, float]
    """The newest value of each metric that this process wrote to metrics.jsonl."""
