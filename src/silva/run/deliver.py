"""Rollout without training: each row once (times the epochs), samples delivered to files."""

from __future__ import annotations

from collections.abc import Callable

from silva.run.metrics import rollout_metrics
from silva.run.producer import Producer
from silva.run.report import StepReport
from silva.store import MetricsWriter, RunLedger


async def deliver(
    *,
    producer: Producer,
    ledger: RunLedger,
    metrics: MetricsWriter,
    report: StepReport,
    num_rollout: int | None,
    passrate: bool,
    say: Callable[[str], None],
) -> int:
    """Run rollout steps until `num_rollout` are done or the prompts are over; returns how many. Nothing that failed is
    made up for."""
    rollout_id = 0
    while num_rollout is None or rollout_id < num_rollout:
        step = await producer.collect(rollout_id)
        groups = step.groups
        if not groups:
            break
        ledger.end_prompts([group.prompt.prompt_id for group in groups], "delivered", train_step=rollout_id)
        values = rollout_metrics(step, passrate=passrate)
        values |= await report.finish(rollout_id)
        metrics.write(rollout_id, values)
        reward = values.get("rollout/raw_reward")
        say(
            f"step {rollout_id}: {len(groups)} groups, {values['rollout/num_sessions']:.0f} sessions, "
            f"reward {'none' if reward is None else f'{reward:.3f}'}"
        )
        rollout_id += 1
    return rollout_id
