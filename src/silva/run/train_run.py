"""A training run: agents roll out, a backend learns, or a backend learns from the dumps of an earlier run."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from silva.config import RunConfig, write_config_file
from silva.data import Dataset
from silva.rollout import FailureBudget, GroupRunner, RecordedGroups
from silva.run.assembly import build_report, open_groups, open_producer
from silva.run.evaluator import Evaluator
from silva.run.parts import run_id_of
from silva.run.prepared import Prepared
from silva.run.run_loop import RunLoop, RunLoopSettings
from silva.run.runtime import Runtime, open_runtime
from silva.run.settings import eval_concurrency, group_settings, trained_groups
from silva.run.setup import RunResult, RunSetup
from silva.run.user_code import build_credit, open_user_code
from silva.store import DB_NAME, METRICS_NAME, MetricsWriter, lock_run
from silva.train import latest_checkpoint
from silva.types import ConfigError

log = logging.getLogger("silva")


async def train(setup: RunSetup, prepared: Prepared) -> RunResult:
    """Rollout steps with their updates, from the start or from the newest checkpoint of a stopped run."""
    config, run_dir, say = setup.config, setup.run_dir, setup.watcher.say
    assert prepared.prompts is not None
    folder = latest_checkpoint(run_dir / "checkpoints") if setup.resumed else None
    backend, first = None, 0
    async with AsyncExitStack() as stack:
        trains = not config.debug_rollout_only
        # before the models, which take longer to load than a function that cannot work
        user_code = await open_user_code(config, run_dir, run_id_of(run_dir), stack, trains=trains)
        if trains:
            from silva.run.build_learner import open_learner  # it imports torch

            backend = await open_learner(config, stack, user_code, num_rollout=prepared.num_rollout)
        if folder is not None:
            assert backend is not None
            first = (await backend.load(folder)).step + 1
        say(f"run folder: {run_dir}" + (f", going on at step {first}" if setup.resumed else ""))
        runtime = await stack.enter_async_context(
            open_runtime(
                setup,
                recover_step=first - 1 if setup.resumed else None,
                engine_dir=folder,
                version=0 if backend is None else backend.version,
                user_code=user_code,
            )
        )
        groups, budget = await open_groups(runtime, credited=True)
        metrics = MetricsWriter(run_dir, keep_before_step=first if setup.resumed else None)
        loop = RunLoop(
            backend=backend,
            engine=runtime.engine,
            source=await open_producer(runtime, prepared.prompts, groups, budget, replace_dropped=True),
            evaluator=_evaluator(runtime, prepared.evals, groups, budget),
            ledger=runtime.ledger,
            metrics=metrics,
            report=build_report(runtime),
            settings=_loop_settings(config, run_dir, first),
            say=say,
        )
        try:
            num_steps = await loop.run()
        except BaseException:
            at = loop.saved_rollout
            where = f"goes on at step {at}" if at else "starts over, since no checkpoint was written (--save-interval)"
            log.info("the run ended early; silva train --resume %s %s", run_dir, where)
            raise
    say(f"done; look at it with: silva show {run_dir}")
    return RunResult(run_dir=run_dir, num_steps=num_steps, metrics=metrics.latest)


async def train_on_records(setup: RunSetup) -> RunResult:
    """Training on the dumps of another run. It has neither prompts nor sessions, so there is no run ledger."""
    from silva.run.build_learner import open_learner  # it imports torch

    config, run_dir, say = setup.config, setup.run_dir, setup.watcher.say
    used = [name for name in (DB_NAME, METRICS_NAME) if (run_dir / name).exists()]
    if used:
        raise ConfigError(f"--run-dir {run_dir} holds a run already ({used[0]}); take another folder")
    assert config.load_debug_rollout_data is not None
    metrics = MetricsWriter(run_dir)
    async with AsyncExitStack() as stack:
        stack.enter_context(lock_run(run_dir, must_exist=False))
        no_rewards = replace(config, custom_rm_path=None)
        user_code = await open_user_code(no_rewards, run_dir, run_id_of(run_dir), stack, trains=True)
        write_config_file(config, run_dir / "config.toml")
        say(f"run folder: {run_dir}; training on {config.load_debug_rollout_data}, without agents")
        source = RecordedGroups(
            config.load_debug_rollout_data,
            num_rollout=config.num_rollout,
            settings=trained_groups(config),
            credit=build_credit(config, user_code),
        )
        loop = RunLoop(
            backend=await open_learner(config, stack, user_code, num_rollout=config.num_rollout),
            engine=None,
            source=source,
            evaluator=None,
            ledger=None,
            metrics=metrics,
            report=None,
            settings=_loop_settings(config, run_dir, 0),
            say=say,
        )
        num_steps = await loop.run()
    say(f"done; the numbers are in {run_dir / METRICS_NAME}")
    return RunResult(run_dir=run_dir, num_steps=num_steps, metrics=metrics.latest)


def _evaluator(
    runtime: Runtime, evals: dict[str, Dataset], groups: GroupRunner, budget: FailureBudget
) -> Evaluator | None:
    if not evals or runtime.config.eval_interval is None:
        return None
    return Evaluator(
        datasets=evals,
        groups=groups,
        ledger=runtime.ledger,
        budget=budget,
        concurrency=eval_concurrency(runtime.config),
        settings=group_settings(runtime.config, "eval"),
        passrate=runtime.config.log_passrate,
        on_step=runtime.setup.watcher.begin_step,
    )


def _loop_settings(config: RunConfig, run_dir: Path, first: int) -> RunLoopSettings:
    whole = config.rollout_batch_size and config.rollout_batch_size * config.n_samples_per_prompt
    return RunLoopSettings(
        run_dir=run_dir,
        first_rollout=first,
        num_rollout=config.num_rollout,
        global_batch_size=config.global_batch_size or whole,
        num_steps=config.num_steps_per_rollout,
        custom_credit=config.has_custom_advantage,
        eval_interval=config.eval_interval,
        save_interval=config.save_interval,
        save_hf=None if config.save_hf is None else Path(config.save_hf),
        passrate=config.log_passrate,
    )
