"""Builds what makes the groups of a run out of its running parts."""

from __future__ import annotations

from silva.data import Dataset, PromptSource
from silva.rollout import EachSession, FailureBudget, GroupRunner, ProcessDriver
from silva.run.policy import SyncPolicy
from silva.run.producer import Producer
from silva.run.report import StepReport
from silva.run.runtime import Runtime
from silva.run.settings import group_settings, train_concurrency, trained_groups
from silva.run.user_code import build_credit, build_rewards

TERM_GRACE_S = 5.0


def serving_counters(runtime: Runtime) -> dict[str, float]:
    """Counts of the gateway and the engine since the process started, train and eval together, by metric name."""
    numbers: dict[str, float] = {}
    for name, count in runtime.turns.counters.items():
        kind = name.removeprefix("match_")
        forest = kind != name or name.startswith("repair_")
        numbers[f"forest/{kind}" if forest else f"gateway/{name}"] = float(count)
    for name, count in runtime.exporter.counters.items():
        numbers[f"export/{name}"] = float(count)
    for name, count in runtime.engine.usage().counters.items():
        numbers[f"engine/{name}"] = float(count)
    return numbers


async def open_groups(runtime: Runtime, *, credited: bool = False) -> tuple[GroupRunner, FailureBudget]:
    """The runner process and what runs sessions through it. `credited`: the groups get their credit for training."""
    config = runtime.config
    log_path = runtime.run_dir / "runner.log"
    runner = runtime.setup.runner_factory(run_id=runtime.run_id, grace_s=TERM_GRACE_S, log_path=log_path)
    await runner.start()
    runtime.stack.push_async_callback(runner.close)
    driver = ProcessDriver(
        runner,
        config,
        runtime.clock,
        runtime.registry.end,
        runtime.exporter,
        run_dir=runtime.run_dir,
        run_id=runtime.run_id,
        base_url=runtime.server.base_url,
    )
    budget = FailureBudget(config.agent_max_failures, runtime.run_dir)
    rewards = build_rewards(config, runtime.user_code, runtime.codec.decode)
    runtime.step_numbers.append(rewards.take_numbers)
    groups = GroupRunner(
        registry=runtime.registry,
        driver=EachSession(driver),
        leases=runtime.leases,
        ledger=runtime.ledger,
        budget=budget,
        rewards=rewards,
        credit=build_credit(config, runtime.user_code) if credited else None,
        on_scored=runtime.setup.watcher.scored,
    )
    return groups, budget


async def open_producer(
    runtime: Runtime, dataset: Dataset, groups: GroupRunner, budget: FailureBudget, *, replace_dropped: bool
) -> Producer:
    """Rollout steps over the prompt data, from where a resumed run continues."""
    config, recovered = runtime.config, runtime.recovered
    assert config.rollout_batch_size is not None
    pending = [] if recovered is None else recovered.pending
    source = PromptSource(
        dataset,
        num_epoch=config.num_epoch,
        shuffle=config.rollout_shuffle,
        seed=config.rollout_seed,
        next_position=0 if recovered is None else recovered.next_position,
        pending=(prompt.position for prompt in pending),
    )
    for prompt in pending:
        source.check_place(position=prompt.position, epoch=prompt.epoch, row=prompt.row)
    producer = Producer(
        source=source,
        groups=groups,
        ledger=runtime.ledger,
        budget=budget,
        policy=SyncPolicy(
            batch_size=config.rollout_batch_size, concurrency=train_concurrency(config), replace=replace_dropped
        ),
        group_settings=trained_groups(config) if replace_dropped else group_settings(config, "train"),
        issued={prompt.prompt_id: prompt.num_groups for prompt in pending},
        on_step=runtime.setup.watcher.begin_step,
    )
    return await runtime.stack.enter_async_context(producer)


def build_report(runtime: Runtime) -> StepReport:
    """What closes the accounts of a step."""
    return StepReport(
        run_dir=runtime.run_dir,
        ledger=runtime.ledger,
        dump_path=runtime.config.save_debug_rollout_data,
        counters=lambda: {**serving_counters(runtime), **_step_numbers(runtime)},
    )


def _step_numbers(runtime: Runtime) -> dict[str, float]:
    return {name: value for numbers in runtime.step_numbers for name, value in numbers().items()}
