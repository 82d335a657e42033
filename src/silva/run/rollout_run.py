"""A run without training: agents run, their samples are delivered to files."""

from __future__ import annotations

from silva.run.assembly import build_report, open_groups, open_producer
from silva.run.deliver import deliver
from silva.run.prepared import Prepared
from silva.run.runtime import open_runtime
from silva.run.setup import RunResult, RunSetup
from silva.store import MetricsWriter


async def roll_out(setup: RunSetup, prepared: Prepared) -> RunResult:
    """Run rollout steps until the options or the prompts end it."""
    config, run_dir, say = setup.config, setup.run_dir, setup.watcher.say
    assert prepared.prompts is not None
    metrics = MetricsWriter(run_dir)
    say(f"run folder: {run_dir}")
    async with open_runtime(setup) as runtime:
        groups, budget = await open_groups(runtime)
        num_steps = await deliver(
            producer=await open_producer(runtime, prepared.prompts, groups, budget, replace_dropped=False),
            ledger=runtime.ledger,
            metrics=metrics,
            report=build_report(runtime),
            num_rollout=config.num_rollout,
            passrate=config.log_passrate,
            say=say,
        )
    say(f"samples: {config.save_debug_rollout_data} (one file a step); look at the run with: silva show {run_dir}")
    return RunResult(run_dir=run_dir, num_steps=num_steps, metrics=metrics.latest)
