"""What a run lets its caller replace: the engine, and the runner process of its agents."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from silva.codec import TurnCodec
from silva.config import RunConfig
from silva.inference import Engine
from silva.rollout import AgentProcesses
from silva.types import Clock


class EngineFactory(Protocol):
    """Builds the engine of a run; the run starts and closes it. `build_engine` is the default.

    `hf_dir` contains the weights to start with, which have version `version`.
    """

    def __call__(
        self, config: RunConfig, codec: TurnCodec, clock: Clock, *, hf_dir: Path, version: int = 0
    ) -> Engine: ...


class Runner(AgentProcesses, Protocol):
    """Owns the agents of a run: `AgentRunner`, or what replaces it."""

    async def start(self) -> None: ...

    async def close(self) -> None:
        """End every agent that still runs."""
        ...


class RunnerFactory(Protocol):
    """Builds the runner of a run; the run starts and closes it. `AgentRunner` is the default.

    `grace_s`: seconds between TERM and KILL. `log_path`: where the runner may write what goes wrong.
    """

    def __call__(self, *, run_id: str, grace_s: float, log_path: Path) -> Runner: ...
