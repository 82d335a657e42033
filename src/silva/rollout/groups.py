"""Sessions of one prompt: start, retry, record, and the group that is left."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from silva.data.prompts import Prompt
from silva.gateway.sessions import SessionRegistry
from silva.rollout.driver import RUNNER_LOST, SessionDriver
from silva.state.lineage import build_samples, node_records
from silva.state.session import Session
from silva.store.ledger import RunLedger
from silva.types.errors import RunStopped, SessionFailure
from silva.types.messages import JsonObject
from silva.types.rollout import Mode, SessionRecord, SessionStatus, TrainingSample

log = logging.getLogger("silva.rollout")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotFailure:
    """The last failure of a slot whose retries are used up."""

    session_id: str
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupResult:
    """What became of one prompt. `dropped` is the reason where too few sessions are left, else None."""

    prompt: Prompt
    group_id: str
    samples: tuple[TrainingSample, ...]
    failures: tuple[SlotFailure, ...]
    dropped: str | None = None


class FailureBudget:
    """Stops the run after too many failed sessions in a row; the error carries the first failure of that row."""

    def __init__(self, limit: int):
        self._limit = limit
        self._in_row = 0
        self._first: SlotFailure | None = None

    def success(self) -> None:
        self._in_row = 0
        self._first = None

    def failure(self, failure: SlotFailure) -> None:
        """Count one. Raises RunStopped at the limit."""
        self._first = self._first or failure
        self._in_row += 1
        if self._in_row >= self._limit:
            raise self.stopped(f"{self._in_row} sessions failed in a row (--agent-max-failures {self._limit})")

    def stopped(self, why: str) -> RunStopped:
        """The error for a run that cannot go on, with the first failure's text."""
        first = self._first
        tail = "" if first is None else f"\nThe first: session {first.session_id}, {first.reason}: {first.message}"
        return RunStopped(f"{why}.{tail}")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSettings:
    """How the groups of one mode run. `text_only`: what takes the samples cannot take images."""

    mode: Mode
    num_samples: int
    min_size: int
    num_retries: int
    text_only: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a session ended, before it is written."""

    status: SessionStatus
    samples: tuple[TrainingSample, ...] = ()
    reason: str | None = None
    message: str | None = None
    reward: float | None = None
    metadata: JsonObject = field(default_factory=dict[str, object])


class GroupRunner:
    """Runs the sessions of a prompt and writes each to the ledger.

    Consumes a Prompt that the ledger knows as pending; waits for its sessions (all slots at once, retries one after the
    other); produces a GroupResult. A failed session is data. Raises RunStopped when the failure budget is spent, and
    when agents cannot be run any more.
    """

    def __init__(
        self,
        *,
        registry: SessionRegistry,
        driver: SessionDriver,
        ledger: RunLedger,
        budget: FailureBudget,
        on_scored: Callable[[Mode], None] = lambda mode: None,
    ):
        self._registry = registry
        self._driver = driver
        self._ledger = ledger
        self._budget = budget
        self._on_scored = on_scored

    async def run(self, prompt: Prompt, settings: GroupSettings, *, rollout_id: int, attempt: int = 0) -> GroupResult:
        place = f"g{rollout_id}-{prompt.prompt_id.replace(':', '-')}-{attempt}"
        group_id = f"{place}-{secrets.token_hex(4)}"  # a resumed run may come by the same place again
        self._ledger.start_group(
            group_id, prompt_id=prompt.prompt_id, n=settings.num_samples, rollout_id=rollout_id, attempt=attempt
        )
        async with asyncio.TaskGroup() as tasks:
            slots = [
                tasks.create_task(self._fill_slot(prompt, group_id, slot, settings, place))
                for slot in range(settings.num_samples)
            ]
        results = [slot.result() for slot in slots]
        samples = tuple(sample for result in results if not isinstance(result, SlotFailure) for sample in result)
        failures = tuple(result for result in results if isinstance(result, SlotFailure))
        num_left = len(results) - len(failures)
        dropped = None
        if num_left < settings.min_size:
            dropped = "all_sessions_failed" if num_left == 0 else "group_too_small"
            samples = ()
        return GroupResult(prompt=prompt, group_id=group_id, samples=samples, failures=failures, dropped=dropped)

    async def _fill_slot(
        self, prompt: Prompt, group_id: str, slot: int, settings: GroupSettings, place: str
    ) -> tuple[TrainingSample, ...] | SlotFailure:
        result = await self._run_slot(prompt, group_id, slot, settings, place)
        self._on_scored(settings.mode)
        return result

    async def _run_slot(
        self, prompt: Prompt, group_id: str, slot: int, settings: GroupSettings, place: str
    ) -> tuple[TrainingSample, ...] | SlotFailure:
        """One session after the other until one is exported or the retries are used up.

        A session that was lost with the runner process says nothing about its agent: it costs neither a retry nor
        budget (the runner has a bound of its own).
        """
        num_failed = 0
        for try_index in itertools.count():
            session_id = f"{group_id}-{slot}-{try_index}-{secrets.token_hex(12)}"
            self._ledger.start_session(session_id, group_id=group_id, slot=slot, try_index=try_index)
            session = self._registry.open(session_id, group_id, settings.mode)
            session.input = prompt.input
            session.prompt_id = prompt.prompt_id
            session.runtime_group_id = group_id if settings.mode == "train" else f"{group_id}-{slot}"
            session.seed_key = f"{place}-{slot}-{try_index}"
            outcome = await self._run_session(session, text_only=settings.text_only)
            if outcome.status == "exported":
                self._budget.success()
                return outcome.samples
            failure = SlotFailure(session_id=session_id, reason=outcome.reason or "", message=outcome.message or "")
            log.warning("session %s failed (%s): %s", session_id, failure.reason, failure.message)
            if failure.reason == RUNNER_LOST:
                continue
            self._budget.failure(failure)
            num_failed += 1
            if num_failed > settings.num_retries:
                return failure
        raise AssertionError("the tries are counted for ever")

    async def _run_session(self, session: Session, *, text_only: bool) -> Outcome:
        """The recorder: whatever happens to the session, its end is written once."""
        outcome = Outcome(status="cancelled", reason="run_stopped", message="the run stopped before the session ended")
        try:
            session.open_gate()
            records = await self._driver.run(session)
            samples = build_samples(session.forest, records, session_id=session.session_id, group_id=session.group_id)
            if text_only:
                refuse_images(samples)
            outcome = Outcome(
                status="exported", samples=samples, reward=records[0].reward, metadata=records[0].metadata
            )
        except SessionFailure as failure:
            outcome = Outcome(status="failed", reason=failure.reason, message=str(failure))
        except RunStopped:
            raise  # no fault of this session: it is cancelled with the run
        except Exception as error:  # a session's fault must not take the run with it
            log.exception("session %s failed inside Silva", session.session_id)
            outcome = Outcome(status="failed", reason="internal_error", message=f"{type(error).__name__}: {error}")
        finally:
            await self._registry.end(session.session_id)
            self._ledger.end_session(session_record(session, outcome))
        return outcome


def refuse_images(samples: Iterable[TrainingSample]) -> None:
    """Raise SessionFailure where a sample holds images."""
    for sample in samples:
        if sample.images:
            raise SessionFailure(
                "images_not_trainable",
                f"the context to train on holds {len(sample.images)} image(s), and the trainer of this version takes "
                "text only; use silva rollout to collect samples with images, or an agent that sends none",
            )


def session_record(session: Session, outcome: Outcome) -> SessionRecord:
    """Everything that the ledger keeps of a session that ended."""
    return SessionRecord(
        session_id=session.session_id,
        group_id=session.group_id,
        mode=session.mode,
        status=outcome.status,
        reason=outcome.reason,
        error=outcome.message,
        reward=outcome.reward,
        metadata=outcome.metadata,
        nodes=node_records(session.forest),
        requests=session.requests,
        attempts=session.attempts,
        samples=list(outcome.samples),
    )
