"""From prompts to groups: the rollout step. Rollout waits for training, so staleness is 0."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

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
        done: list[GroupResult] = []
        num_started = num_dropped = 0
        source_over = False
        running: set[asyncio.Task[GroupResult]] = set()
        async with asyncio.TaskGroup() as tasks:
            while True:
                wanted = self._settings.batch_size - (len(done) if self._settings.replace else num_started)
                room = self._settings.concurrency - len(running)
                spare = wanted - len(running) if self._settings.replace else wanted
                while not source_over and min(room, spare) > 0:
                    prompt = self._source.take()
                    if prompt is None:
                        source_over = True
                        break
                    running.add(tasks.create_task(self._run(prompt, rollout_id)))
                    num_started, room, spare = num_started + 1, room - 1, spare - 1
                if not running:
                    break
                finished, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    result = task.result()
                    if result.dropped is None:
                        done.append(result)
                    else:
                        num_dropped += 1
                        self._drop(result, rollout_id)
                if num_dropped >= self._settings.batch_size and not done:
                    self._stop_if_wanted(rollout_id, num_dropped)
        if num_started and not done:
            self._stop_if_wanted(rollout_id, num_dropped)
        done.sort(key=lambda result: result.prompt.position)
        return done

    async def _run(self, prompt: Prompt, rollout_id: int) -> GroupResult:
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
        return await self._groups.run(prompt, self._group_settings, rollout_id=rollout_id, attempt=attempt or 0)

    def _stop_if_wanted(self, rollout_id: int, num_dropped: int) -> None:
        if self._settings.stop_if_all_fail:
            raise self._budget.stopped(
                f"none of the {num_dropped} groups of rollout step {rollout_id} kept enough sessions"
            )

    def _drop(self, result: GroupResult, rollout_id: int) -> None:
        assert result.dropped is not None
        self._ledger.end_prompts([result.prompt.prompt_id], "dropped", reason=result.dropped, step=rollout_id)
