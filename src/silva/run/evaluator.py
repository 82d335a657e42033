"""Evaluation: every row of a held-out file once, under its own sampling, apart from training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from silva.credit import by_session
from silva.data import Dataset, PromptSource
from silva.judge import GroupSettings
from silva.rollout import FailureBudget, GroupRunner, StepGroups
from silva.run.metrics import helper_metrics, passrate_metrics, reward_metrics
from silva.run.policy import SyncPolicy
from silva.run.producer import Producer
from silva.store import RunLedger


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """Reward over the sessions that have one, how many sessions were exported and how many slots yielded none.

    `numbers` are its metrics over sessions and slots, by name.
    """

    name: str
    """Of the dataset."""
    rollout_id: int
    """The rollout step that would use these weights."""
    mean_reward: float | None
    """Over the sessions that have a reward; None where none has."""
    num_sessions: int
    """Sessions that were exported."""
    num_failed: int
    """Slots that yielded none."""
    numbers: dict[str, float] = field(default_factory=dict[str, float])
    """Its metrics over sessions and slots, by name."""

    def metrics(self) -> dict[str, float]:
        prefix = f"eval/{self.name}"
        counts = {f"{prefix}/num_sessions": float(self.num_sessions), f"{prefix}/num_failed": float(self.num_failed)}
        return {**counts, **self.numbers}


@dataclass(kw_only=True, eq=False)
class Evaluator:
    """Runs the eval files one after the other. Neither shares prompts nor groups with training."""

    datasets: dict[str, Dataset]
    """Held-out rows by name."""
    groups: GroupRunner
    """Runs the groups."""
    ledger: RunLedger
    """Where eval prompts are issued and end."""
    budget: FailureBudget
    """Counts failures in a row, shared with training."""
    concurrency: int
    """Groups that may have agents at the same time."""
    settings: GroupSettings
    """How the groups run."""
    passrate: bool = False
    """Add pass@k to the metrics."""
    on_step: Callable[[str, int], None] = lambda title, num_sessions: None
    """Called with the title of each eval and the number of its sessions."""

    async def run(self, rollout_id: int) -> list[EvalResult]:
        """Evaluate the weights that rollout step `rollout_id` would use."""
        return [await self._run_one(name, dataset, rollout_id) for name, dataset in self.datasets.items()]

    async def _run_one(self, name: str, dataset: Dataset, rollout_id: int) -> EvalResult:
        producer = Producer(
            source=PromptSource(dataset, name=f"eval-{name}-{rollout_id}", num_epoch=1, shuffle=False, seed=0),
            groups=self.groups,
            ledger=self.ledger,
            budget=self.budget,
            policy=SyncPolicy(
                batch_size=len(dataset.rows), concurrency=self.concurrency, replace=False, stop_if_all_fail=False
            ),
            group_settings=self.settings,
            on_step=self.on_step,
        )
        async with producer:
            step = await producer.collect(rollout_id)
        self.ledger.end_prompts([result.prompt.prompt_id for result in step.groups], "delivered", train_step=rollout_id)
        return self._summary(name, rollout_id, step, len(dataset.rows))

    def _summary(self, name: str, rollout_id: int, step: StepGroups, num_rows: int) -> EvalResult:
        prefix = f"eval/{name}"
        sessions = by_session(sample for result in step.groups for sample in result.samples)
        numbers = {
            **reward_metrics(f"{prefix}/reward", prefix, sessions),
            **helper_metrics(prefix, sessions),
            **(passrate_metrics(prefix, step.tallies) if self.passrate else {}),
        }
        return EvalResult(
            name=name,
            rollout_id=rollout_id,
            mean_reward=numbers.get(f"{prefix}/reward"),
            num_sessions=len(sessions),
            num_failed=num_rows * self.settings.num_samples - len(sessions),
            numbers=numbers,
        )
