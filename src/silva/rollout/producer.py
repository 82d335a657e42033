"""From prompts to groups: the rollout step. Rollout waits for training, so staleness is 0."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from silva.data.prompts import Prompt, PromptSource
from silva.rollout.groups import FailureBudget, GroupResult, GroupRunner, GroupSettings
from silva.store.ledger import RunLedger


@dataclass(frozen=True, kw_only=True, slots=True)
class ProducerSettings:
    """`batch_size` groups make a step, at most `concurrency` are resident.

    `replace`: a dropped group is made up for. `stop_if_all_fail`: a step without one good group ends the run.
    """

    batch_size: int
    concurrency: int
    replace: bool
    stop_if_all_fail: bool = True


@dataclass(kw_only=True, slots=True)
class _Step:
    """A rollout step in progress."""

    rollout_id: int
    num_started: int = 0
    num_dropped: int = 0
    done: list[GroupResult] = field(default_factory=list[GroupResult])
    running: set[asyncio.Task[GroupResult]] = field(default_factory=set["asyncio.Task[GroupResult]"])


class Producer:
    """Collects the groups of one rollout step.

    Consumes prompts of a PromptSource (each is issued in the ledger first); waits for resident groups, woken by each
    that ends; produces the groups that count, in order of issue. Dropped groups end in the ledger here, with their
    reason; the others stay pending until whoever takes them says what became of them. `issued` counts the groups that
    prompts of an earlier life of the run had; `on_step` is told each step's title and how many sessions it wants.
    """

    def __init__(
        self,
        *,
        source: PromptSource,
        groups: GroupRunner,
        ledger: RunLedger,
        budget: FailureBudget,
        settings: ProducerSettings,
        group_settings: GroupSettings,
        issued: dict[str, int] | None = None,
        on_step: Callable[[str, int], None] = lambda title, num_sessions: None,
    ):
        self._source = source
        self._groups = groups
        self._ledger = ledger
        self._budget = budget
        self._settings = settings
        self._group_settings = group_settings
        self._issued = dict(issued or {})
        self._on_step = on_step

    async def collect(self, rollout_id: int) -> list[GroupResult]:
        """The groups of one step; fewer than a batch when the prompts are over, none when there is nothing left.

        Raises RunStopped when a whole batch of groups yielded no session at all.
        """
        mode, size = self._group_settings.mode, self._group_settings.num_samples
        self._on_step(f"{mode} step {rollout_id}", self._settings.batch_size * size)
        step = _Step(rollout_id=rollout_id)
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._fill(step, tasks)
                if not step.running:
                    break
                finished, step.running = await asyncio.wait(step.running, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    self._settle(step, task.result())
                if step.num_dropped >= self._settings.batch_size and not step.done:
                    self._stop_if_wanted(step)
        if step.num_started and not step.done:
            self._stop_if_wanted(step)
        return sorted(step.done, key=lambda result: result.prompt.position)

    def _fill(self, step: _Step, tasks: asyncio.TaskGroup) -> None:
        """Start groups while the step wants more, capacity is free and there are prompts."""
        settings = self._settings
        filled = len(step.done) + len(step.running) if settings.replace else step.num_started
        room = min(settings.batch_size - filled, settings.concurrency - len(step.running))
        for _ in range(room):
            prompt = self._source.take()
            if prompt is None:
                return
            attempt = self._issue(prompt)
            run = self._groups.run(prompt, self._group_settings, rollout_id=step.rollout_id, attempt=attempt)
            step.running.add(tasks.create_task(run))
            step.num_started += 1

    def _issue(self, prompt: Prompt) -> int:
        """Write a prompt's begin, unless an earlier life of the run did; returns how many groups it had."""
        attempt = self._issued.pop(prompt.prompt_id, None)
        if attempt is None:
            self._ledger.issue_prompt(
                prompt.prompt_id,
                dataset=prompt.dataset,
                epoch=prompt.epoch,
                row=prompt.row,
                position=prompt.position,
                mode=self._group_settings.mode,
            )
        return attempt or 0

    def _settle(self, step: _Step, result: GroupResult) -> None:
        if result.dropped is None:
            step.done.append(result)
            return
        step.num_dropped += 1
        self._ledger.end_prompts([result.prompt.prompt_id], "dropped", reason=result.dropped, step=step.rollout_id)

    def _stop_if_wanted(self, step: _Step) -> None:
        if self._settings.stop_if_all_fail:
            raise self._budget.stopped(
                f"none of the {step.num_dropped} groups of rollout step {step.rollout_id} kept enough sessions"
            )
