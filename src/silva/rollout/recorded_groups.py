"""Rollout steps from the dumps of an earlier run: the same samples again, without agents."""

from __future__ import annotations

import asyncio
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from silva.credit import train_shared
from silva.judge import UNFIT, CreditStage, GroupResult, GroupSettings, Outcome, SlotEnd, checked, close_group
from silva.rollout.group_tally import StepGroups, tally
from silva.store import RecordedGroup, RecordedSession, dump_path, read_rollout_dump
from silva.types import DatasetError, GroupEnd

_COUNTED = ("trained", "delivered")


@dataclass(eq=False)
class RecordedGroups:
    """The training groups of `PATH-with-{rollout_id}`, one file a step.

    Consumes dumps; produces groups that end by the rule of a live run, with the recorded rewards: `settings` decide
    which sessions can be trained and how many a group needs (`num_samples` is the recorded size of each group), and
    `credit` gives credit anew. Groups that did not count when they were recorded are left out again, but stay in the
    denominators. Turns that contexts share are trained as the settings say, however they were recorded. Steps end at
    the first missing file, unless `num_rollout` asks for it.
    """

    template: str
    """Path of the dumps, with {rollout_id}."""
    _: KW_ONLY
    num_rollout: int | None
    """Steps that must exist; None: up to the first missing file."""
    settings: GroupSettings
    """How the groups end."""
    credit: CreditStage | None = None
    """Gives the groups their credit."""

    async def collect(self, rollout_id: int) -> StepGroups:
        """The groups of one step. Raises DatasetError where its file is missing, is none of ours, or cannot train."""
        path = dump_path(self.template, rollout_id)
        if not path.exists() and rollout_id and self.num_rollout is None:
            return StepGroups(groups=[])
        recorded = await asyncio.to_thread(read_rollout_dump, path)
        results = [await self._result(path, group) for group in recorded]
        groups = [result for result in results if result.end is None]
        if not groups:
            raise DatasetError(f"{path}: {_why_none(results)}")
        return StepGroups(groups=groups, ended=[tally(result) for result in results if result.end is not None])

    async def _result(self, path: Path, group: RecordedGroup) -> GroupResult:
        slots = group.slots()
        end: GroupEnd | None = None
        if group.prompt_state not in _COUNTED or not any(one.contexts for one in slots):
            state = "filtered" if group.prompt_state == "filtered" else "dropped"
            end = GroupEnd(group.prompt_reason or group.prompt_state, "it did not count when recorded", state=state)
        elif len(slots) < group.size:
            raise DatasetError(
                f"{path} holds lines of {len(slots)} of the {group.size} slots of group {group.group_id}: the file "
                "is not whole, and half a group would be credited otherwise than it was"
            )
        settings = replace(self.settings, num_samples=group.size, min_size=min(self.settings.min_size, group.size))
        ends = [
            SlotEnd(slot=one.slot, session_id=one.session_id, outcome=_outcome(settings, one, known=end is not None))
            for one in slots
        ]
        return await close_group(
            settings, ends, prompt=group.prompt, group_id=group.group_id, credit=self.credit, end=end
        )


def _outcome(settings: GroupSettings, session: RecordedSession, *, known: bool) -> Outcome:
    """The recorded end of a session, or that of one that cannot be trained here."""
    if not session.contexts:
        return Outcome(status="failed", reason=session.reason or session.status, message=session.error)
    samples = tuple(context.sample for context in session.contexts)
    return Outcome.exported(samples) if known else checked(settings, train_shared(samples, settings.shared_prefix))


def _why_none(results: list[GroupResult]) -> str:
    """Why a file has nothing to train on, with the first session that cannot be trained here."""
    for failure in (failure for result in results for failure in result.failures):
        if failure.reason in UNFIT:
            return f"no group is left to train on; the first session that cannot be trained: {failure.message}"
    return "it holds no group that was trained or delivered: there is nothing to train on"
