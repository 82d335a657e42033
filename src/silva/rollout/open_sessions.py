"""Sessions that clients open by themselves: `silva serve --open-sessions`."""

from __future__ import annotations

import asyncio

from silva.export import Exporter, export_session, session_samples
from silva.judge import Outcome
from silva.rollout.group_runner import session_record
from silva.rollout.leases import Leases
from silva.store import RunLedger
from silva.turns import Session
from silva.types import JsonObject, Samples, SessionFailure, SharedPrefix

OPEN_DATASET = "open"


class OpenSessions:
    """Keeps the accounts of open sessions: each is a prompt and a group of its own.

    Consumes what the gateway tells (a session opened, a client's output document); produces ledger rows. A session
    counts as ended when its rows are in the run's database.
    """

    def __init__(
        self,
        ledger: RunLedger,
        leases: Leases,
        exporter: Exporter | None = None,
        *,
        shared_prefix: SharedPrefix = "once",
    ):
        self._ledger = ledger
        self._leases = leases
        self._exporter = exporter or Exporter()
        self._shared_prefix: SharedPrefix = shared_prefix
        self._num_opened = 0

    def opened(self, session: Session) -> None:
        """A client opened a session: give it its rows and its lease."""
        prompt_id = f"{OPEN_DATASET}:0:{self._num_opened}"
        self._ledger.issue_prompt(
            prompt_id, dataset=OPEN_DATASET, epoch=0, row=self._num_opened, position=self._num_opened, mode=session.mode
        )
        self._num_opened += 1
        session.prompt_id = prompt_id
        self._leases.grant(session)
        self._ledger.start_group(session.group_id, prompt_id=prompt_id, n=1, start_step=0)
        self._ledger.start_session(session.session_id, group_id=session.group_id, slot=0)

    async def finish(self, session: Session, body: bytes) -> JsonObject:
        """Export a finished session. A failed export is an answer too, never an error of the request."""
        session.output = body or None
        try:
            samples = await asyncio.to_thread(self._export, session)
            outcome = Outcome.exported(samples)
        except SessionFailure as failure:
            outcome = Outcome.failed(failure)
        await self._end(session, outcome)
        answer: JsonObject = {
            "status": outcome.status,
            "reason": outcome.reason,
            "num_samples": sum(sample.num_trainable > 0 for sample in outcome.samples),
        }
        return answer if outcome.message is None else {**answer, "message": outcome.message}

    def _export(self, session: Session) -> Samples:
        return session_samples(session, export_session(self._exporter, session), self._shared_prefix)

    async def cancel(self, session: Session) -> None:
        """A session that its client never finished."""
        await self._end(session, Outcome(status="cancelled", reason="serve_stopped", message="the server stopped"))

    async def _end(self, session: Session, outcome: Outcome) -> None:
        assert session.prompt_id is not None
        self._leases.release(session)
        self._ledger.end_session(session_record(session, outcome))
        if outcome.status == "exported":
            self._ledger.end_prompts([session.prompt_id], "delivered", train_step=0)
        else:
            self._ledger.end_prompts([session.prompt_id], "dropped", reason=outcome.reason, train_step=0)
        await asyncio.wrap_future(self._ledger.flush_future())
