"""`silva rollout`: run agents and deliver their samples, without training."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from silva.cli.build import (
    choose_run_dir,
    group_settings,
    load_prompts,
    open_groups,
    open_runtime,
    serving_counters,
    train_concurrency,
)
from silva.cli.loop import run_async
from silva.config.options import RunConfig
from silva.config.parse import resolve
from silva.config.validate import validate
from silva.data.prompts import PromptSource
from silva.data.rows import Dataset
from silva.model.torch_env import prepare
from silva.rollout.deliver import deliver
from silva.rollout.producer import Producer, ProducerSettings
from silva.rollout.report import StepReport
from silva.store.metrics import MetricsWriter
from silva.view.console import RunView


def run(args: argparse.Namespace) -> int:
    config = resolve(args)
    validate(config, "rollout")
    assert config.prompt_data is not None
    dataset = load_prompts(config, Path(config.prompt_data))
    run_dir = choose_run_dir(config)
    dump = config.save_debug_rollout_data or str(run_dir / "samples" / "{rollout_id}.jsonl")
    config = replace(config, run_dir=str(run_dir), save_debug_rollout_data=dump, num_epoch=config.num_epoch or 1)
    prepare()
    with RunView(run_dir / "run.log") as view:
        return run_async(lambda: _rollout(config, view, run_dir, dataset))


async def _rollout(config: RunConfig, view: RunView, run_dir: Path, dataset: Dataset) -> int:
    view.say(f"run folder: {run_dir}")
    assert config.rollout_batch_size is not None
    async with open_runtime(config, view, run_dir) as runtime:
        groups, budget = await open_groups(runtime)
        producer = Producer(
            source=PromptSource(
                dataset, num_epoch=config.num_epoch, shuffle=config.rollout_shuffle, seed=config.rollout_seed
            ),
            groups=groups,
            ledger=runtime.ledger,
            budget=budget,
            settings=ProducerSettings(
                batch_size=config.rollout_batch_size, concurrency=train_concurrency(config), replace=False
            ),
            group_settings=group_settings(config, "train"),
            on_step=view.begin_step,
        )
        await deliver(
            producer=producer,
            ledger=runtime.ledger,
            metrics=MetricsWriter(run_dir),
            report=StepReport(
                run_dir=run_dir,
                ledger=runtime.ledger,
                dump_path=config.save_debug_rollout_data,
                counters=lambda: serving_counters(runtime),
            ),
            num_rollout=config.num_rollout,
            say=view.say,
        )
    view.say(f"samples: {config.save_debug_rollout_data}")
    return 0
