"""`silva train`: the main job."""

from __future__ import annotations

import argparse
import logging
import math
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from silva.cli.loop import run_async
from silva.config.options import RunConfig
from silva.config.parse import read_config_file, resolve, write_config_file
from silva.config.validate import eval_sets, one_context_reason, trains_on_records, validate
from silva.config.validate_training import check_training_run
from silva.data.prompts import PromptSource
from silva.data.rows import Dataset
from silva.model.torch_env import prepare
from silva.rollout.failure_budget import FailureBudget
from silva.rollout.group_runner import GroupRunner
from silva.rollout.recorded_groups import RecordedGroups
from silva.run.assembly import (
    Runtime,
    build_producer,
    build_report,
    check_row_budget,
    choose_run_dir,
    load_prompts,
    open_groups,
    open_runtime,
    run_id_of,
)
from silva.run.build_learner import build_learner
from silva.run.evaluator import Evaluator
from silva.run.settings import credit_of, credit_share, eval_concurrency, group_settings
from silva.run.user_code import build_credit, build_custom_tis, open_user_code
from silva.store.files import DB_NAME, lock_run
from silva.store.metrics import METRICS_NAME, MetricsWriter
from silva.store.queries import counts, open_run, pending_places
from silva.types.errors import ConfigError
from silva.view.console import RunView

log = logging.getLogger("silva")

if TYPE_CHECKING:
    from silva.run.loop import TrainerSettings


def run(args: argparse.Namespace) -> int:
    resumed = None if args.resume is None else Path(args.resume)
    base = None if resumed is None else read_config_file(_config_of(resumed))
    config = resolve(args, base=base)
    validate(config, "train")
    check_row_budget(config)
    if resumed is not None:
        _refuse_other_runs(resumed, config)
    run_dir = choose_run_dir(config) if resumed is None else resumed.absolute()
    config = replace(config, run_dir=str(run_dir))
    if trains_on_records(config):
        prepare(decodes=False)
        with RunView(run_dir / "run.log") as view:
            return run_async(lambda: _train_on_records(config, view, run_dir))
    assert config.prompt_data is not None
    dataset = load_prompts(config, Path(config.prompt_data))
    if not config.debug_rollout_only:
        check_training_run(config, num_rollout=_num_rollout(config, dataset), records=False)
    if resumed is not None:
        _check_data(resumed, config, dataset)
    evals = {item.name: load_prompts(config, item.path) for item in eval_sets(config)}
    prepare()
    with RunView(run_dir / "run.log") as view:
        return run_async(lambda: _train(config, view, run_dir, dataset, evals, resume=resumed is not None))


def _refuse_other_runs(run_dir: Path, config: RunConfig) -> None:
    if trains_on_records(config) or config.debug_rollout_only:
        flag = "--debug-rollout-only" if config.debug_rollout_only else "--load-debug-rollout-data"
        raise ConfigError(f"--resume {run_dir}: a run with {flag} cannot be resumed; start a new one")
    with open_run(run_dir) as conn:
        if counts(conn)["prompts"].get("delivered"):
            raise ConfigError(f"--resume {run_dir}: this is a run of silva rollout or serve, which cannot be resumed")


def _check_data(run_dir: Path, config: RunConfig, dataset: Dataset) -> None:
    """DatasetError where prompts of the run are not found at their places; said before a model is loaded."""
    source = PromptSource(dataset, num_epoch=config.num_epoch, shuffle=config.rollout_shuffle, seed=config.rollout_seed)
    with open_run(run_dir) as conn:
        for position, epoch, row in pending_places(conn):
            source.check_place(position=position, epoch=epoch, row=row)


def _config_of(run_dir: Path) -> Path:
    path = run_dir / "config.toml"
    if not path.exists():
        raise ConfigError(f"--resume {run_dir}: there is no run in this folder (it has no config.toml)")
    return path


async def _train(
    config: RunConfig, view: RunView, run_dir: Path, dataset: Dataset, evals: dict[str, Dataset], *, resume: bool
) -> int:
    from silva.run.loop import Trainer
    from silva.train.checkpoint import latest_checkpoint
    from silva.train.learner import TorchThread

    folder = latest_checkpoint(run_dir / "checkpoints") if resume else None
    learner, first = None, 0
    async with AsyncExitStack() as stack:
        trains = not config.debug_rollout_only
        # before the models, which take longer to load than a function that cannot work
        user_code = await open_user_code(config, run_dir, run_id_of(run_dir), stack, trains=trains)
        if trains:
            thread = TorchThread()
            stack.callback(thread.close)
            learner = await build_learner(
                config,
                thread,
                stack,
                num_rollout=_num_rollout(config, dataset),
                weigh_tokens=build_custom_tis(config, user_code),
            )
        if folder is not None:
            assert learner is not None
            state = await learner.load(folder)
            first = state.step + 1
        view.say(f"run folder: {run_dir}" + (f", going on at step {first}" if resume else ""))
        runtime = await stack.enter_async_context(
            open_runtime(
                config,
                view,
                run_dir,
                recover_step=first - 1 if resume else None,
                engine_dir=folder,
                version=0 if learner is None else learner.version,
                user_code=user_code,
            )
        )
        groups, budget = await open_groups(runtime, credited=True)
        trainer = Trainer(
            backend=learner,
            engine=runtime.engine,
            source=build_producer(runtime, dataset, groups, budget, replace_dropped=True),
            evaluator=_evaluator(runtime, evals, groups, budget),
            ledger=runtime.ledger,
            metrics=MetricsWriter(run_dir, keep_before_step=first if resume else None),
            report=build_report(runtime),
            settings=_trainer_settings(config, run_dir, first),
            say=view.say,
        )
        try:
            await trainer.run()
        except BaseException:
            at = trainer.saved_rollout
            where = f"goes on at step {at}" if at else "starts over, since no checkpoint was written (--save-interval)"
            log.info("the run ended early; silva train --resume %s %s", run_dir, where)
            raise
    view.say(f"done; look at it with: silva show {run_dir}")
    return 0


async def _train_on_records(config: RunConfig, view: RunView, run_dir: Path) -> int:
    """Training on the dumps of another run. Neither prompts nor sessions exist here, so there is no run ledger."""
    from silva.run.loop import Trainer
    from silva.train.learner import TorchThread

    used = [name for name in (DB_NAME, METRICS_NAME) if (run_dir / name).exists()]
    if used:
        raise ConfigError(f"--run-dir {run_dir} holds a run already ({used[0]}); take another folder")
    assert config.load_debug_rollout_data is not None
    async with AsyncExitStack() as stack:
        stack.enter_context(lock_run(run_dir, must_exist=False))
        no_rewards = replace(config, custom_rm_path=None)
        user_code = await open_user_code(no_rewards, run_dir, run_id_of(run_dir), stack, trains=True)
        write_config_file(config, run_dir / "config.toml")
        view.say(f"run folder: {run_dir}; training on {config.load_debug_rollout_data}, without agents")
        thread = TorchThread()
        stack.callback(thread.close)
        source = RecordedGroups(
            config.load_debug_rollout_data,
            num_rollout=config.num_rollout,
            credit=build_credit(config, user_code),
            one_context=one_context_reason(config),
            shared_prefix=config.agentic_shared_prefix,
        )
        trainer = Trainer(
            backend=await build_learner(
                config, thread, stack, num_rollout=config.num_rollout, weigh_tokens=build_custom_tis(config, user_code)
            ),
            engine=None,
            source=source,
            evaluator=None,
            ledger=None,
            metrics=MetricsWriter(run_dir),
            report=None,
            settings=_trainer_settings(config, run_dir, 0),
            say=view.say,
        )
        await trainer.run()
    view.say(f"done; the numbers are in {run_dir / METRICS_NAME}")
    return 0


def _num_rollout(config: RunConfig, dataset: Dataset) -> int | None:
    """Rollout steps of the whole run, as far as the options and the data tell."""
    assert config.rollout_batch_size is not None
    counts = [] if config.num_rollout is None else [config.num_rollout]
    if config.num_epoch is not None:
        counts.append(math.ceil(len(dataset.rows) * config.num_epoch / config.rollout_batch_size))
    return min(counts, default=None)


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
        on_step=runtime.view.begin_step,
    )


def _trainer_settings(config: RunConfig, run_dir: Path, first: int) -> TrainerSettings:
    from silva.run.loop import TrainerSettings

    whole = config.rollout_batch_size and config.rollout_batch_size * config.n_samples_per_prompt
    return TrainerSettings(
        run_dir=run_dir,
        first_rollout=first,
        num_rollout=config.num_rollout,
        global_batch_size=config.global_batch_size or whole,
        num_steps=config.num_steps_per_rollout,
        credit_of=credit_of(config),
        credit_share=credit_share(config),
        shared_prefix=config.agentic_shared_prefix,
        eval_interval=config.eval_interval,
        save_interval=config.save_interval,
        save_hf=None if config.save_hf is None else Path(config.save_hf),
        passrate=config.log_passrate,
    )
