"""The groups that run, for the length of a run: they outlive the step in which they started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol

from silva.data import Prompt, PromptSource
from silva.judge import GroupResult, GroupSettings
from silva.store import RunLedger


class RunGroup(Protocol):
    """Runs one group to its end, as `GroupRunner.run` does."""

    async def __call__(
        self, prompt: Prompt, settings: GroupSettings, *, start_step: int, attempt: int, left: Callable[[], None]
    ) -> GroupResult: ...


class GroupPool:
    """Owns the running groups.

    Consumes prompts (each is issued in the ledger before its group starts); waits for nothing by itself; produces
    GroupResults in the order in which the groups ended. `changed` wakes when the agents of a group left, which makes
    room for another group, and when a group was judged. Entered once, by the task that also waits for it: a crash in a
    group ends that task and all groups, as does leaving it early.
    """

    def __init__(
        self,
        *,
        source: PromptSource,
        run_group: RunGroup,
        ledger: RunLedger,
        settings: GroupSettings,
        issued: Mapping[str, int] | None = None,
    ):
        """`issued`: prompts that the ledger has from before a resume, with the groups that each had."""
        self._source = source
        self._run_group = run_group
        self._ledger = ledger
        self._settings = settings
        self._issued = dict(issued or {})
        self._tasks = asyncio.TaskGroup()
        self._wake = asyncio.Event()
        self._ended: list[GroupResult] = []
        self._running: set[asyncio.Task[None]] = set()
        self.num_resident = 0
        """Groups that still have an agent."""
        self.prompts_left = True
        """False once the source has no prompt any more."""

    async def __aenter__(self) -> GroupPool:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._running:
            task.cancel()
        if isinstance(error, asyncio.CancelledError):  # it may be a group's crash that cancelled the body
            await self._tasks.__aexit__(kind, error, trace)
        else:
            await self._tasks.__aexit__(None, None, None)

    @property
    def num_running(self) -> int:
        """Groups that have not ended."""
        return len(self._running)

    def start(self, number: int, *, start_step: int) -> int:
        """Start so many groups, fewer where the prompts are over. Returns how many."""
        for num_started in range(number):
            prompt = self._source.take()
            if prompt is None:
                self.prompts_left = False
                return num_started
            task = self._tasks.create_task(self._run(prompt, self._issue(prompt), start_step))
            self._running.add(task)
            task.add_done_callback(self._end)
            self.num_resident += 1
        return number

    async def changed(self) -> None:
        """Wait until there is room, or a result, that was not there when this returned last."""
        await self._wake.wait()
        self._wake.clear()

    def take_ended(self) -> list[GroupResult]:
        """The groups that ended since this was asked last."""
        ended, self._ended = self._ended, []
        return ended

    async def _run(self, prompt: Prompt, attempt: int, start_step: int) -> None:
        result = await self._run_group(prompt, self._settings, start_step=start_step, attempt=attempt, left=self._left)
        self._ended.append(result)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._wake.set()

    def _left(self) -> None:
        self.num_resident -= 1
        self._wake.set()

    def _issue(self, prompt: Prompt) -> int:
        """Write a prompt's begin, unless that was done before a resume; returns how many groups it had."""
        attempt = self._issued.pop(prompt.prompt_id, None)
        if attempt is None:
            self._ledger.issue_prompt(
                prompt.prompt_id,
                dataset=prompt.dataset,
                epoch=prompt.epoch,
                row=prompt.row,
                position=prompt.position,
                mode=self._settings.mode,
                content={**prompt.input.to_json(), "label": prompt.label},
            )
        return attempt or 0
