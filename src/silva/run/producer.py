"""From prompts to groups: the rollout step. Rollout waits for training, so staleness is 0."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from silva.data.prompts import Prompt, PromptSource
from silva.judge.group_end import GroupResult, GroupSettings
from silva.rollout.failure_budget import FailureBudget
from silva.rollout.group_runner import GroupRunner
from silva.rollout.tally import GroupTally, StepGroups, tally
from silva.store.ledger import RunLedger
from silva.types.errors import GroupEnd

MAX_FILTERED_BATCHES = 16
"""So many batches of groups that a filter took out, with none left between them, are a filter that takes out all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProducerSettings:
    """`batch_size` groups make a step; at most `concurrency` have agents.

    `replace`: a group that does not count is made up for. `stop_if_all_fail`: a step without a good group ends the run.
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
    num_resident: int = 0
    num_dropped: int = 0
    num_filtered: int = 0
    last_end: GroupEnd | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    done: list[GroupResult] = field(default_factory=list[GroupResult])
    ended: list[GroupTally] = field(default_factory=list[GroupTally])
    running: set[asyncio.Task[GroupResult]] = field(default_factory=set["asyncio.Task[GroupResult]"])

    def left(self) -> None:
        """The agents of a group ended: there is room for another group, though this one is not judged yet."""
        self.num_resident -= 1
        self.wake.set()


class Producer:
    """Collects the groups of one rollout step.

    Consumes prompts of a PromptSource (each is issued in the ledger first); waits for groups, woken by each whose
    agents ended and each that was judged; produces the groups that count, in order of issue. Those that do not count
    end in the ledger here, with their reason; the others stay pending until whoever takes them says what became
    of them. `issued` counts the groups that prompts of an earlier life of the run had; `on_step` is told each step's
    title and how many sessions it wants.
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

    async def collect(self, rollout_id: int) -> StepGroups:
        """The groups of one step; fewer than a batch when the prompts are over, none when there is nothing left.

        Raises RunStopped when a whole batch of groups was dropped, or MAX_FILTERED_BATCHES of them filtered, and none
        counted.
        """
        mode, size = self._group_settings.mode, self._group_settings.num_samples
        self._on_step(f"{mode} step {rollout_id}", self._settings.batch_size * size)
        step = _Step(rollout_id=rollout_id)
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._fill(step, tasks)
                if not step.running:
                    break
                await step.wake.wait()
                step.wake.clear()
                for task in [task for task in step.running if task.done()]:
                    step.running.discard(task)
                    self._settle(step, task.result())
                if not step.done and self._is_hopeless(step):
                    self._stop_if_wanted(step)
        if step.num_started and not step.done:
            self._stop_if_wanted(step)
        return StepGroups(groups=sorted(step.done, key=lambda result: result.prompt.position), ended=step.ended)

    def _fill(self, step: _Step, tasks: asyncio.TaskGroup) -> None:
        """Start groups while the step wants more, capacity is free and there are prompts."""
        settings = self._settings
        filled = len(step.done) + len(step.running) if settings.replace else step.num_started
        room = min(settings.batch_size - filled, settings.concurrency - step.num_resident)
        for _ in range(room):
            prompt = self._source.take()
            if prompt is None:
                return
            attempt = self._issue(prompt)
            run = self._groups.run(
                prompt, self._group_settings, start_step=step.rollout_id, attempt=attempt, left=step.left
            )
            task = tasks.create_task(run)
            task.add_done_callback(lambda _: step.wake.set())
            step.running.add(task)
            step.num_started += 1
            step.num_resident += 1

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
                content={**prompt.input.to_json(), "label": prompt.label},
            )
        return attempt or 0

    def _settle(self, step: _Step, result: GroupResult) -> None:
        end = result.end
        if end is None:
            step.done.append(result)
            return
        step.num_dropped += end.state == "dropped"
        step.num_filtered += end.state == "filtered"
        step.last_end = end
        step.ended.append(tally(result))
        self._ledger.end_prompts([result.prompt.prompt_id], end.state, reason=end.reason, train_step=step.rollout_id)

    def _is_hopeless(self, step: _Step) -> bool:
        size = self._settings.batch_size
        return step.num_dropped >= size or step.num_filtered >= MAX_FILTERED_BATCHES * size

    def _stop_if_wanted(self, step: _Step) -> None:
        if self._settings.stop_if_all_fail:
            assert step.last_end is not None
            raise self._budget.stopped(
                f"none of the {step.num_dropped + step.num_filtered} groups of rollout step {step.rollout_id} counts; "
                f"the last was {step.last_end.state} ({step.last_end.reason}): {step.last_end}"
            )
