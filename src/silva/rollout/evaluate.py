"""Evaluation: every row of a held-out file once, under its own sampling, apart from training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from silva.data.prompts import PromptSource
from silva.data.rows import Dataset
from silva.rollout.groups import FailureBudget, GroupResult, GroupRunner, GroupSettings
from silva.rollout.metrics import one_a_session
from silva.rollout.producer import Producer, ProducerSettings
from silva.store.ledger import RunLedger


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """Reward over the sessions that were exported, and how many were not."""

    name: str
    rollout_id: int
    mean_reward: float | None
    num_sessions: int
    num_failed: int

    def metrics(self) -> dict[str, float]:
        prefix = f"eval/{self.name}"
        values = {f"{prefix}/num_sessions": float(self.num_sessions), f"{prefix}/num_failed": float(self.num_failed)}
        if self.mean_reward is not None:
            values[f"{prefix}/reward"] = self.mean_reward
        return values


class Evaluator:
    """Runs the eval files one after the other. Neither shares prompts nor groups with training."""

    def __init__(
        self,
        *,
        datasets: dict[str, Dataset],
        groups: GroupRunner,
        ledger: RunLedger,
        budget: FailureBudget,
        concurrency: int,
        settings: GroupSettings,
        on_step: Callable[[str, int], None] = lambda title, num_sessions: None,
    ):
        self._datasets = datasets
        self._groups = groups
        self._ledger = ledger
        self._budget = budget
        self._concurrency = concurrency
        self._settings = settings
        self._on_step = on_step

    async def run(self, rollout_id: int) -> list[EvalResult]:
        """Evaluate the weights that rollout step `rollout_id` would use."""
        return [await self._run_one(name, dataset, rollout_id) for name, dataset in self._datasets.items()]

    async def _run_one(self, name: str, dataset: Dataset, rollout_id: int) -> EvalResult:
        producer = Producer(
            source=PromptSource(dataset, name=f"eval-{name}-{rollout_id}", num_epoch=1, shuffle=False, seed=0),
            groups=self._groups,
            ledger=self._ledger,
            budget=self._budget,
            settings=ProducerSettings(
                batch_size=len(dataset.rows), concurrency=self._concurrency, replace=False, stop_if_all_fail=False
            ),
            group_settings=self._settings,
            on_step=self._on_step,
        )
        results = await producer.collect(rollout_id)
        self._ledger.end_prompts([result.prompt.prompt_id for result in results], "delivered", step=rollout_id)
        return self._summary(name, rollout_id, results, len(dataset.rows))

    def _summary(self, name: str, rollout_id: int, results: list[GroupResult], num_rows: int) -> EvalResult:
        sessions = one_a_session(sample for result in results for sample in result.samples)
        rewards = [sample.reward for sample in sessions if sample.reward is not None]
        wanted = num_rows * self._settings.num_samples
        return EvalResult(
            name=name,
            rollout_id=rollout_id,
            mean_reward=math.fsum(rewards) / len(rewards) if rewards else None,
            num_sessions=len(rewards),
            num_failed=wanted - len(rewards),
        )
