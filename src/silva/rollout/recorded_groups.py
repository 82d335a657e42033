"""Rollout steps from the dumps of an earlier run: the same samples again, without agents."""

from __future__ import annotations

import asyncio
from pathlib import Path

from silva.credit.assign import session_reward
from silva.credit.shared import by_session, train_shared
from silva.forest.lineage import SharedPrefix
from silva.judge.group_end import CreditStage, GroupResult, SlotFailure, refuse_images, refuse_several
from silva.rollout.tally import GroupTally, StepGroups, tally
from silva.store.dumps import dump_path
from silva.store.loads import RecordedGroup, read_rollout_dump
from silva.types.errors import DatasetError, GroupEnd, SessionFailure
from silva.types.rollout import TrainingSample

_COUNTED = ("trained", "delivered")


class RecordedGroups:
    """The training groups of `PATH-with-{rollout_id}`, one file a step.

    Groups that were dropped or filtered are left out again, as are sessions that failed; both stay in the denominators.
    `credit` gives credits of its own to each group, as in the run that was recorded. `one_context`: why a session may
    have no more than one context. Turns that contexts share are trained as `shared_prefix` says, however they were
    recorded. Steps end at the first missing file, unless `num_rollout` asks for it.
    """

    def __init__(
        self,
        template: str,
        *,
        num_rollout: int | None,
        credit: CreditStage | None = None,
        one_context: str | None = None,
        shared_prefix: SharedPrefix = "once",
    ):
        self._template = template
        self._num_rollout = num_rollout
        self._credit = credit
        self._one_context = one_context
        self._shared_prefix: SharedPrefix = shared_prefix

    async def collect(self, rollout_id: int) -> StepGroups:
        """The groups of one step. Raises DatasetError where its file is missing, is none of ours, or cannot train."""
        path = dump_path(self._template, rollout_id)
        if not path.exists() and rollout_id and self._num_rollout is None:
            return StepGroups(groups=[])
        recorded = await asyncio.to_thread(read_rollout_dump, path)
        groups: list[GroupResult] = []
        ended: list[GroupTally] = []
        for group in recorded:
            result = await self._result(path, group)
            if result.end is None:
                groups.append(result)
            else:
                ended.append(tally(result))
        if not groups:
            raise DatasetError(f"{path} holds no group that was trained or delivered: there is nothing to train on")
        return StepGroups(groups=groups, ended=ended)

    async def _result(self, path: Path, group: RecordedGroup) -> GroupResult:
        slots = group.slots()
        samples = tuple(context.sample for session in slots for context in session.contexts)
        end: GroupEnd | None = None
        if group.prompt_state not in _COUNTED or not samples:
            state = "filtered" if group.prompt_state == "filtered" else "dropped"
            end = GroupEnd(group.prompt_reason or group.prompt_state, "it did not count", state=state)
        else:
            if len(slots) < group.size:
                raise DatasetError(
                    f"{path} holds lines of {len(slots)} of the {group.size} slots of group {group.group_id}: the file "
                    "is not whole, and half a group would be credited otherwise than it was"
                )
            self._check(path, samples)
            samples = train_shared(samples, self._shared_prefix)
            try:
                samples = samples if self._credit is None else await self._credit.assign(samples)
            except GroupEnd as found:
                end = found
        failures = tuple(
            SlotFailure(session_id=one.session_id, reason=one.reason or one.status, message=one.error or "")
            for one in slots
            if not one.contexts
        )
        return GroupResult(prompt=group.prompt, group_id=group.group_id, samples=samples, failures=failures, end=end)

    def _check(self, path: Path, samples: tuple[TrainingSample, ...]) -> None:
        """Raise DatasetError for samples that no training run would have taken."""
        try:
            refuse_images(samples)
            for contexts in by_session(samples):
                refuse_several(contexts, self._one_context)
                if self._credit is None:
                    session_reward(contexts)
        except SessionFailure as failure:
            raise DatasetError(f"{path}: {failure}") from failure
