"""Sessions of one prompt: start, retry, record, and the group that is left.

slot 0   session 0-0 exported ------------------------+
slot 1   session 1-0 failed   session 1-1 exported ---+--> judged as a group --> credited --> GroupResult
slot 2   session 2-0 failed   session 2-1 failed -----+
         (agents resident until their last one ends)
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from silva.data import Prompt
from silva.export import session_samples
from silva.forest import node_rows
from silva.judge import (
    CreditStage,
    GroupResult,
    GroupSettings,
    Outcome,
    RewardStage,
    SlotEnd,
    close_group,
    judge_group,
    judge_session,
)
from silva.rollout.failure_budget import FailureBudget
from silva.rollout.group_driver import LEFT_OUT, RUNNER_LOST, GroupDriver, SessionResult
from silva.rollout.leases import Leases
from silva.store import RunLedger
from silva.turns import Session, SessionRegistry
from silva.types import Mode, RunStopped, SessionFailure, SessionRow

log = logging.getLogger("silva.rollout")

T = TypeVar("T")

_STOPPED = Outcome(status="cancelled", reason="run_stopped", message="the run stopped before the session ended")


@dataclass(kw_only=True, eq=False)
class _Group:
    """A group that runs."""

    prompt: Prompt
    """The row's use that the group samples."""
    group_id: str
    """Names the prompt and the attempt; unique in the run."""
    seed_key: str
    """Beginning of its sessions' seed keys: start step, prompt and attempt."""
    settings: GroupSettings
    """How it runs."""
    left: Callable[[], None]
    """To be called once, when no slot has an agent any more."""
    resident: set[int]
    """Slots that still have an agent, or may get another one."""
    num_tries: Counter[int] = field(default_factory=Counter[int])
    """Sessions opened, by slot."""
    num_failed: Counter[int] = field(default_factory=Counter[int])
    """Failed tries that count against the retries, by slot."""
    unwritten: dict[str, Session] = field(default_factory=dict[str, Session])
    """Sessions whose end is not in the ledger yet."""
    ends: dict[int, SlotEnd] = field(default_factory=dict[int, SlotEnd])
    """The last session of each slot, once it ended."""

    def leave(self, slot: int) -> None:
        """The agent of a slot ended for good."""
        if slot in self.resident:
            self.resident.remove(slot)
            if not self.resident:
                self.left()


@dataclass(kw_only=True, eq=False)
class GroupRunner:
    """Runs the sessions of a prompt, has them judged and credited, and writes each to the ledger.

    Consumes a Prompt that the ledger knows as pending; waits for its sessions (all slots at once, retries one after the
    other), then for rewards and credit; produces a GroupResult. A failed session is data. Raises RunStopped when the
    failure budget is spent, and when agents cannot be run any more.
    """

    registry: SessionRegistry
    """Opens and ends the sessions of the turn service."""
    driver: GroupDriver
    """Runs the sessions."""
    leases: Leases
    """Gives and takes the permission to run."""
    ledger: RunLedger
    """Where starts and ends are written."""
    budget: FailureBudget
    """Counts failures in a row."""
    rewards: RewardStage
    """Judges sessions, or whole groups."""
    credit: CreditStage | None = None
    """Gives training groups their credit; without it, samples stay without credit."""
    on_scored: Callable[[Mode], None] = lambda mode: None
    """Called with the mode when a slot has its last session."""

    async def run(
        self,
        prompt: Prompt,
        settings: GroupSettings,
        *,
        start_step: int,
        attempt: int = 0,
        left: Callable[[], None] = lambda: None,
    ) -> GroupResult:
        """One group to its end. `left` is called when its agents ended; rewards and credit come after that."""
        name, slots = f"{prompt.prompt_id.replace(':', '-')}-{attempt}", range(settings.num_samples)
        group = _Group(
            prompt=prompt,
            group_id=f"g-{name}-{secrets.token_hex(4)}",  # random: a resumed run may make the same attempt again
            seed_key=f"g{start_step}-{name}",
            settings=settings,
            left=left,
            resident=set(slots),
        )
        self.ledger.start_group(
            group.group_id, prompt_id=prompt.prompt_id, n=len(slots), start_step=start_step, attempt=attempt
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                for together in [slots] if self.driver.whole_groups else [[slot] for slot in slots]:
                    tasks.create_task(self._fill(group, together))
            return await self._close(group)
        finally:
            for session in list(group.unwritten.values()):
                self._write(group, session, _STOPPED)

    async def _close(self, group: _Group) -> GroupResult:
        """The end of the group, by the rule that all groups have; sessions that waited for it are written."""
        ends = [group.ends[slot] for slot in sorted(group.ends)]
        found = await judge_group(group.settings, self.rewards, ends)
        for end in ends:
            if end.session is not None and end.session_id in group.unwritten:
                self._write(group, end.session, end.outcome)
                if found is None:
                    self._count(end)
        return await close_group(
            group.settings, ends, prompt=group.prompt, group_id=group.group_id, credit=self.credit, end=found
        )

    async def _fill(self, group: _Group, slots: Sequence[int]) -> None:
        """One session after the other in each slot, until one is exported or the retries are used up."""
        while slots:
            slots = [end.slot for end in await self._round(group, slots) if self._runs_again(group, end)]

    def _runs_again(self, group: _Group, end: SlotEnd) -> bool:
        """Whether the slot gets another session.

        A session that was lost with the runner process says nothing about its agent: it costs neither a retry nor
        budget (the runner has a bound of its own). What fails after its agent ended, in its judgement or since the
        options do not let it be trained, fares no better by running the agent again.
        """
        outcome = end.outcome
        if outcome.reason == RUNNER_LOST:
            log.warning("session %s failed (%s): %s", end.session_id, outcome.reason, outcome.message)
            return True
        self._count(end)
        if outcome.status != "exported" and outcome.retry:
            group.num_failed[end.slot] += 1
            if group.num_failed[end.slot] <= group.settings.num_retries:
                return True
        group.leave(end.slot)
        group.ends[end.slot] = end
        self.on_scored(group.settings.mode)
        return False

    def _count(self, end: SlotEnd) -> None:
        """Count a session that ended in the failure budget."""
        if end.outcome.status == "exported":
            self.budget.success()
            return
        failure = end.failure()
        log.warning("session %s failed (%s): %s", failure.session_id, failure.reason, failure.message)
        self.budget.failure(failure)

    async def _round(self, group: _Group, slots: Sequence[int]) -> list[SlotEnd]:
        """A new session in each of these slots: its agent, its export and its judgement."""
        opened = [self._open(group, slot) for slot in slots]

        def again(session: Session) -> Session:
            opened.append(self._open(group, session.slot))
            return opened[-1]

        try:
            results = await self._guarded(_names(opened), self.driver.run(tuple(opened), again))
        finally:
            for session in opened:
                await self.registry.end(session.session_id)
                self.leases.release(session)
        if isinstance(results, SessionFailure):
            results = dict.fromkeys((session.session_id for session in opened), results)
        last: dict[int, Session] = {}
        for session in opened:
            if session.slot not in last or isinstance(results.get(session.session_id), list):
                last[session.slot] = session
        missing = SessionFailure(LEFT_OUT, "the agent loop did not return this session")
        for session in opened:
            if session is not last[session.slot]:
                result = results.get(session.session_id)
                failure = result if isinstance(result, SessionFailure) else missing
                self._write(group, session, Outcome.failed(failure))
        ended = [(session, results.get(session.session_id, missing)) for session in last.values()]
        return await asyncio.gather(*(self._end(group, session, result) for session, result in ended))

    def _open(self, group: _Group, slot: int) -> Session:
        """A session in the ledger and for the gateway, with its lease."""
        settings, prompt, try_index = group.settings, group.prompt, group.num_tries[slot]
        group.num_tries[slot] += 1
        session_id = f"{group.group_id}-{slot}-{try_index}-{secrets.token_hex(12)}"
        self.ledger.start_session(session_id, group_id=group.group_id, slot=slot, try_index=try_index)
        session = self.registry.open(session_id, group.group_id, settings.mode)
        session.slot, session.try_index, session.row = slot, try_index, prompt.row
        session.input, session.label, session.prompt_id = prompt.input, prompt.label, prompt.prompt_id
        whole = settings.mode == "train" or self.rewards.group_wise
        session.runtime_group_id = group.group_id if whole else f"{group.group_id}-{slot}"
        session.seed_key = f"{group.seed_key}-{slot}-{try_index}"
        group.unwritten[session_id] = session
        self.leases.grant(session)
        return session

    async def _end(self, group: _Group, session: Session, result: SessionResult) -> SlotEnd:
        """Form the contexts of a session whose agent ended, and judge them. Its end is written, unless the whole group
        is judged at once: then `_close` does it.
        """
        settings = group.settings
        if isinstance(result, SessionFailure):
            samples = result
        else:
            export = asyncio.to_thread(session_samples, session, result, settings.shared_prefix)
            samples = await self._guarded(_names([session]), export)
        if isinstance(samples, SessionFailure):
            outcome = Outcome.failed(samples, retry=samples.reason != LEFT_OUT)
        else:
            group.leave(session.slot)
            judgement = judge_session(settings, self.rewards, session, samples)
            judged = await self._guarded(_names([session]), judgement)
            outcome = Outcome.failed(judged, retry=False) if isinstance(judged, SessionFailure) else judged
        if outcome.status != "exported" or not self.rewards.group_wise:
            self._write(group, session, outcome)
        return SlotEnd(slot=session.slot, session_id=session.session_id, session=session, outcome=outcome)

    async def _guarded(self, what: str, work: Awaitable[T]) -> T | SessionFailure:
        """The recorder: whatever goes wrong is a failure on record, except what ends the run."""
        try:
            return await work
        except SessionFailure as failure:
            return failure
        except RunStopped:
            raise  # no fault of this session: it is cancelled with the run
        except Exception as error:  # a session's fault must not take the run with it
            log.exception("%s failed inside Silva", what)
            return SessionFailure("internal_error", f"{type(error).__name__}: {error}")

    def _write(self, group: _Group, session: Session, outcome: Outcome) -> None:
        del group.unwritten[session.session_id]
        self.ledger.end_session(session_record(session, outcome))


def _names(sessions: Iterable[Session]) -> str:
    return "session " + ", ".join(session.session_id for session in sessions)


def session_record(session: Session, outcome: Outcome) -> SessionRow:
    """Everything that the ledger keeps of a session that ended."""
    return SessionRow(
        session_id=session.session_id,
        group_id=session.group_id,
        mode=session.mode,
        status=outcome.status,
        reason=outcome.reason,
        error=outcome.message,
        reward=outcome.reward,
        metadata=outcome.metadata,
        nodes=node_rows(session.forest),
        requests=session.requests,
        attempts=session.attempts,
        samples=list(outcome.samples),
        output=session.output,
    )
