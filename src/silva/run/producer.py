"""From prompts to the groups of a step: a pool of running groups, a buffer of those that count, and a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType

from silva.data import PromptSource
from silva.judge import GroupSettings
from silva.rollout import FailureBudget, GroupRunner, StepGroups
from silva.run.group_buffer import GroupBuffer
from silva.run.group_pool import GroupPool
from silva.run.policy import Policy, StepProgress
from silva.store import RunLedger


class Producer:
    """Collects the groups of one rollout step after the other.

    Consumes the decisions of a policy; waits for the pool, woken by each group whose agents left and each that was
    judged; produces the groups that the policy takes, in its order. Entered once, before the first step.
    """

    def __init__(
        self,
        *,
        source: PromptSource,
        groups: GroupRunner,
        ledger: RunLedger,
        budget: FailureBudget,
        policy: Policy,
        group_settings: GroupSettings,
        issued: Mapping[str, int] | None = None,
        on_step: Callable[[str, int], None] = lambda title, num_sessions: None,
    ):
        """`on_step` is called with the title of each step and the number of its sessions. `issued`: see GroupPool."""
        self._pool = GroupPool(
            source=source, run_group=groups.run, ledger=ledger, settings=group_settings, issued=issued
        )
        self._buffer = GroupBuffer(ledger)
        self._budget = budget
        self._policy = policy
        self._settings = group_settings
        self._on_step = on_step
        self._num_started = 0

    async def __aenter__(self) -> Producer:
        await self._pool.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._pool.__aexit__(kind, error, trace)

    async def collect(self, rollout_id: int) -> StepGroups:
        """The groups of one step; fewer than a batch when the prompts are over, none when there is nothing left.

        Raises RunStopped where the policy finds that no group of the step will count.
        """
        policy, settings = self._policy, self._settings
        self._on_step(f"{settings.mode} step {rollout_id}", policy.batch_size * settings.num_samples)
        while True:
            number = policy.may_start(self._check(rollout_id))
            self._num_started += self._pool.start(number, start_step=rollout_id)
            groups = policy.may_take(self._check(rollout_id))
            if groups is not None:
                self._num_started = 0
                return StepGroups(groups=groups, ended=self._buffer.take(groups))
            await self._pool.changed()
            for result in self._pool.take_ended():
                self._buffer.put(result, step=rollout_id)

    def _check(self, rollout_id: int) -> StepProgress:
        """Where the run is. Raises RunStopped where it cannot go on."""
        now = self._schedule()
        if self._policy.must_stop(now):
            end = self._buffer.last_end
            assert end is not None
            raise self._budget.stopped(
                f"none of the {now.num_dropped + now.num_filtered} groups of rollout step {rollout_id} counts; "
                f"the last was {end.state} ({end.reason}): {end}"
            )
        return now

    def _schedule(self) -> StepProgress:
        pool, buffer = self._pool, self._buffer
        return StepProgress(
            num_started=self._num_started,
            num_running=pool.num_running,
            num_resident=pool.num_resident,
            held=tuple(buffer.held),
            num_dropped=buffer.num_ended["dropped"],
            num_filtered=buffer.num_ended["filtered"],
            prompts_left=pool.prompts_left,
        )
