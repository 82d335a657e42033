"""The Python door: the same objects that the commands use.

    import silva

    run = silva.open_run("run.toml", num_rollout=2)       # or a RunConfig, a dict, or options alone
    result = await run.train()                            # in a notebook as it is; asyncio.run(run.train()) in a script
    result.metrics["rollout/raw_reward"]

    again = silva.open_run(resume=result.run_dir, num_rollout=4)
    await again.train()

Nothing here touches signals or starts an event loop: a run ends early when its task is cancelled, and then ends every
agent, writes its ledger and returns its folder like one that SIGTERM stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from silva.agent import AgentRunner
from silva.config import Command, RunConfig, from_values, read_config_file, refuse_unknown
from silva.run.factories import EngineFactory, RunnerFactory
from silva.run.parts import build_engine, choose_run_dir
from silva.run.prepared import Prepared, prepare_run, saved_options
from silva.run.rollout_run import roll_out
from silva.run.runtime import open_runtime
from silva.run.setup import RunResult, RunSetup
from silva.run.train_run import train, train_on_records
from silva.run.watcher import RunWatcher

Options = RunConfig | Mapping[str, object] | str | Path
"""Where options come from: as they are, by name, or the path of a TOML file."""


def open_run(
    config: Options | None = None,
    *,
    resume: str | Path | None = None,
    watcher: RunWatcher | None = None,
    engine_factory: EngineFactory = build_engine,
    runner_factory: RunnerFactory = AgentRunner,
    **options: object,
) -> Run:
    """A run under these options; nothing starts yet. `options` win over `config`, which wins over a resumed run's.

    `resume`: the folder of a stopped training run to continue. `watcher` receives results and progress (default: the
    log). Raises ConfigError that names the option.
    """
    if not isinstance(config, RunConfig) or options:
        base = {} if resume is None or isinstance(config, RunConfig) else saved_options(Path(resume))
        refuse_unknown(options, "open_run")
        config = from_values({**base, **_values(config), **options})
    run_dir = choose_run_dir(config) if resume is None else Path(resume).absolute()
    run = Run(
        config=replace(config, run_dir=str(run_dir)),
        run_dir=run_dir,
        resumed=resume is not None,
        engine_factory=engine_factory,
        runner_factory=runner_factory,
    )
    run.watcher = watcher or run.watcher
    return run


class Run(RunSetup):
    """One run. `train`, `rollout` or `serve` starts it; a folder takes one run.

    Example: `await silva.open_run("run.toml").train()` returns `RunResult(num_steps=20, ...)`
    """

    def check(self, command: Command) -> Prepared:
        """All that can be refused before anything starts. Raises ConfigError and DatasetError."""
        if command == "rollout":  # its samples are what it is for, so they are written, and each row once
            dump = self.config.save_debug_rollout_data or str(self.run_dir / "samples" / "{rollout_id}.jsonl")
            epochs = self.config.num_epoch or 1
            self.config = replace(self.config, save_debug_rollout_data=dump, num_epoch=epochs)
        return prepare_run(self, command)

    async def train(self, prepared: Prepared | None = None) -> RunResult:
        """Train to the end of the options or of the prompts. `prepared`: what `check` returned, where it was called."""
        prepared = prepared or self.check("train")
        return await (train_on_records(self) if prepared.prompts is None else train(self, prepared))

    async def rollout(self, prepared: Prepared | None = None) -> RunResult:
        """Run agents and write their samples, without training."""
        return await roll_out(self, prepared or self.check("rollout"))

    async def serve(
        self,
        *,
        record: Path | None = None,
        ready: Callable[[str], object] = lambda base_url: None,
        prepared: Prepared | None = None,
    ) -> None:
        """The model API and an engine alone, until cancelled. Any bearer key opens a session of that id.

        `ready` gets the address when the server answers. `record`: a file to which each request is appended with its
        answer.
        """
        if prepared is None:
            self.check("serve")
        async with open_runtime(self, open_sessions=True, record=record) as runtime:
            ready(runtime.server.base_url)
            await asyncio.Event().wait()


def _values(config: Options | None) -> Mapping[str, object]:
    if config is None:
        return {}
    if isinstance(config, RunConfig):
        return asdict(config)
    if isinstance(config, Mapping):
        refuse_unknown(config, "open_run")
        return config
    return read_config_file(Path(config))
