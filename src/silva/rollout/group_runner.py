"""Sessions of one prompt: start, retry, record, and the group that is left."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from silva.data.prompts import Prompt
from silva.export.session_export import session_samples
from silva.forest.lineage import node_rows
from silva.judge.group_end import (
    CreditStage,
    GroupResult,
    GroupSettings,
    Outcome,
    RewardStage,
    SlotFailure,
    judged,
    refuse_images,
    refuse_several,
    too_few_left,
)
from silva.rollout.driver import RUNNER_LOST, SessionDriver
from silva.rollout.failure_budget import FailureBudget
from silva.store.ledger import RunLedger
from silva.turns.session import Session
from silva.turns.session_registry import SessionRegistry
from silva.types.errors import GroupEnd, RunStopped, SessionFailure
from silva.types.rollout import Mode, Samples, SessionRow

log = logging.getLogger("silva.rollout")


_STOPPED = Outcome(status="cancelled", reason="run_stopped", message="the run stopped before the session ended")


@dataclass(kw_only=True, eq=False)
class _Group:
    """A group that runs. `num_resident` slots still have an agent, `left` is called when none has; `held` are the
    sessions that ended and wait, unwritten, for the judgement of the whole group.
    """

    prompt: Prompt
    group_id: str
    seed_key: str
    settings: GroupSettings
    left: Callable[[], None]
    num_resident: int
    held: dict[str, tuple[Session, Outcome]] = field(default_factory=dict[str, "tuple[Session, Outcome]"])

    def slot_left(self) -> None:
        self.num_resident -= 1
        if self.num_resident == 0:
            self.left()


class GroupRunner:
    """Runs the sessions of a prompt, has them judged and credited, and writes each to the ledger.

    Consumes a Prompt that the ledger knows as pending; waits for its sessions (all slots at once, retries one after the
    other), then for rewards and credit; produces a GroupResult. A failed session is data. Raises RunStopped when the
    failure budget is spent, and when agents cannot be run any more.
    """

    def __init__(
        self,
        *,
        registry: SessionRegistry,
        driver: SessionDriver,
        ledger: RunLedger,
        budget: FailureBudget,
        rewards: RewardStage,
        credit: CreditStage | None = None,
        on_scored: Callable[[Mode], None] = lambda mode: None,
    ):
        """`credit` works on groups for training only; without it, samples stay without credit."""
        self._rewards = rewards
        self._credit = credit
        self._registry = registry
        self._driver = driver
        self._ledger = ledger
        self._budget = budget
        self._on_scored = on_scored

    async def run(
        self,
        prompt: Prompt,
        settings: GroupSettings,
        *,
        rollout_id: int,
        attempt: int = 0,
        left: Callable[[], None] = lambda: None,
    ) -> GroupResult:
        """One group to its end. `left` is called when its agents ended; rewards and credit come after that."""
        # random: a resumed run may make the same attempt again
        group_id = f"g-{_dashed(prompt.prompt_id)}-{attempt}-{secrets.token_hex(4)}"
        self._ledger.start_group(
            group_id, prompt_id=prompt.prompt_id, n=settings.num_samples, start_step=rollout_id, attempt=attempt
        )
        group = _Group(
            prompt=prompt,
            group_id=group_id,
            seed_key=f"g{rollout_id}-{_dashed(prompt.prompt_id)}-{attempt}",
            settings=settings,
            left=left,
            num_resident=settings.num_samples,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                slots = [tasks.create_task(self._fill_slot(group, slot)) for slot in range(settings.num_samples)]
            return await self._close(group, [slot.result() for slot in slots])
        finally:
            for session, _ in group.held.values():
                self._write(session, _STOPPED)

    async def _close(self, group: _Group, results: list[Samples | SlotFailure]) -> GroupResult:
        """Judge what waits for the whole group, then credit what is left of it."""
        samples = _exported(results)
        try:
            results = await self._judge_held(group, results)
            samples = _exported(results)
            num_left = sum(not isinstance(result, SlotFailure) for result in results)
            if (small := too_few_left(num_left, len(results), group.settings)) is not None:
                raise small
            if self._credit is not None and group.settings.mode == "train":
                samples = await self._credit.assign(samples)
            end = None
        except GroupEnd as found:
            log.warning("group %s is %s (%s): %s", group.group_id, found.state, found.reason, found)
            end = found
        failures = tuple(result for result in results if isinstance(result, SlotFailure))
        return GroupResult(prompt=group.prompt, group_id=group.group_id, samples=samples, failures=failures, end=end)

    async def _judge_held(self, group: _Group, results: list[Samples | SlotFailure]) -> list[Samples | SlotFailure]:
        """Have the group judged as a whole, where rewards are given so, and write its sessions."""
        if not group.held:
            return results
        waiting = [group.held[name] for name in map(_session_of, results) if name in group.held]
        try:
            verdicts = await self._rewards.judge_group([(session, outcome.samples) for session, outcome in waiting])
        except GroupEnd:
            for session, outcome in waiting:
                self._end_held(group, session, outcome)
            raise
        settled: dict[str, Samples | SlotFailure] = {}
        for (session, _), verdict in zip(waiting, verdicts, strict=True):
            outcome = judged(group.settings, verdict)
            self._end_held(group, session, outcome)
            settled[session.session_id] = self._settled(session, outcome)
        return [settled.get(_session_of(result), result) for result in results]

    def _end_held(self, group: _Group, session: Session, outcome: Outcome) -> None:
        del group.held[session.session_id]
        self._write(session, outcome)

    async def _fill_slot(self, group: _Group, slot: int) -> Samples | SlotFailure:
        result = await self._run_slot(group, slot)
        self._on_scored(group.settings.mode)
        return result

    async def _run_slot(self, group: _Group, slot: int) -> Samples | SlotFailure:
        """One session after the other until one is exported or the retries are used up.

        A session that was lost with the runner process says nothing about its agent: it costs neither a retry nor
        budget (the runner has a bound of its own). What fails after its agent ended, in its judgement or since the
        options do not let it be trained, fares no better by running the agent again.
        """
        settings, num_failed = group.settings, 0
        for try_index in itertools.count():
            session = self._open(group, slot, try_index)
            outcome = await self._run_session(group, session)
            if outcome.reason == RUNNER_LOST:
                log.warning("session %s failed (%s): %s", session.session_id, outcome.reason, outcome.message)
                continue
            result = self._settled(session, outcome)
            if not isinstance(result, SlotFailure) or not outcome.retry:
                return result
            num_failed += 1
            if num_failed > settings.num_retries:
                group.slot_left()
                return result
        raise AssertionError("the tries are counted for ever")

    def _open(self, group: _Group, slot: int, try_index: int) -> Session:
        settings, prompt = group.settings, group.prompt
        session_id = f"{group.group_id}-{slot}-{try_index}-{secrets.token_hex(12)}"
        self._ledger.start_session(session_id, group_id=group.group_id, slot=slot, try_index=try_index)
        session = self._registry.open(session_id, group.group_id, settings.mode)
        session.slot = slot
        session.try_index = try_index
        session.row = prompt.row
        session.input = prompt.input
        session.label = prompt.label
        session.prompt_id = prompt.prompt_id
        whole = settings.mode == "train" or self._rewards.group_wise
        session.runtime_group_id = group.group_id if whole else f"{group.group_id}-{slot}"
        session.seed_key = f"{group.seed_key}-{slot}-{try_index}"
        return session

    def _settled(self, session: Session, outcome: Outcome) -> Samples | SlotFailure:
        """What a slot yields of a session that ended. Counts it in the failure budget."""
        if outcome.status == "exported":
            self._budget.success()
            return outcome.samples
        failure = SlotFailure(session_id=session.session_id, reason=outcome.reason or "", message=outcome.message or "")
        log.warning("session %s failed (%s): %s", session.session_id, failure.reason, failure.message)
        self._budget.failure(failure)
        return failure

    async def _run_session(self, group: _Group, session: Session) -> Outcome:
        """The recorder: whatever happens to the session, its end is written once (by `_judge_held` where it waits for
        the judgement of its group).
        """
        outcome, in_runtime = _STOPPED, True
        try:
            samples = await self._export(group.settings, session)
            in_runtime = False
            group.slot_left()
            # What the options do not let be trained, whatever another run of the agent would bring.
            if group.settings.text_only:
                refuse_images(samples)
            refuse_several(samples, group.settings.one_context)
            if self._rewards.group_wise:
                outcome = Outcome.exported(samples)
                group.held[session.session_id] = (session, outcome)
                return outcome
            outcome = judged(group.settings, await self._rewards.judge_session(session, samples))
        except SessionFailure as failure:
            outcome = Outcome.failed(failure, retry=in_runtime)
        except RunStopped:
            raise  # no fault of this session: it is cancelled with the run
        except Exception as error:  # a session's fault must not take the run with it
            log.exception("session %s failed inside Silva", session.session_id)
            message = f"{type(error).__name__}: {error}"
            outcome = Outcome.failed(SessionFailure("internal_error", message), retry=in_runtime)
        finally:
            if session.session_id not in group.held:
                self._write(session, outcome)
        return outcome

    async def _export(self, settings: GroupSettings, session: Session) -> Samples:
        """Run the session's agent and form the contexts that it exports. Raises SessionFailure."""
        try:
            session.open_gate()
            records = await self._driver.run(session)
        finally:
            await self._registry.end(session.session_id)
        return await asyncio.to_thread(session_samples, session, records, settings.shared_prefix)

    def _write(self, session: Session, outcome: Outcome) -> None:
        self._ledger.end_session(session_record(session, outcome))


def _dashed(prompt_id: str) -> str:
    return prompt_id.replace(":", "-")


def _exported(results: Iterable[Samples | SlotFailure]) -> Samples:
    return tuple(sample for result in results if not isinstance(result, SlotFailure) for sample in result)


def _session_of(result: Samples | SlotFailure) -> str:
    return result.session_id if isinstance(result, SlotFailure) else result[0].session_id


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
