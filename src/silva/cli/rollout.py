"""`silva rollout`: run agents and deliver their samples, without training."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from silva.cli.loop import run_async
from silva.config.options import RunConfig
from silva.config.parse import resolve
from silva.config.validate import validate
from silva.data.rows import Dataset
from silva.model.torch_env import prepare
from silva.run.assembly import build_producer, build_report, choose_run_dir, load_prompts, open_groups, open_runtime
from silva.run.deliver import deliver
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
    prepare(decodes=config.engine == "torch")
    with RunView(run_dir / "run.log") as view:
        return run_async(lambda: _rollout(config, view, run_dir, dataset))


async def _rollout(config: RunConfig, view: RunView, run_dir: Path, dataset: Dataset) -> int:
    view.say(f"run folder: {run_dir}")
    async with open_runtime(config, view, run_dir) as runtime:
        groups, budget = await open_groups(runtime)
        producer = build_producer(runtime, dataset, groups, budget, replace_dropped=False)
        await deliver(
            producer=producer,
            ledger=runtime.ledger,
            metrics=MetricsWriter(run_dir),
            report=build_report(runtime),
            num_rollout=config.num_rollout,
            passrate=config.log_passrate,
            say=view.say,
        )
    view.say(f"samples: {config.save_debug_rollout_data} (one file a step); look at the run with: silva show {run_dir}")
    return 0
