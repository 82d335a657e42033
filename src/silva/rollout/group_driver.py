"""The seam between groups and whatever runs their agents: an agent process per session, or a loop in this process.

A group has slots; each try at a slot is a session. The runner opens the sessions, the driver runs them and says by
session id what each came to. It may run them in any order, together or one after the other, leave some out, and ask for
further tries; the runner takes the results from there (export, reward, retry, ledger).

Example: a loop that samples slot 1 once more and drops slot 2 is given `[s0, s1, s2]`, asks `again(s1)` for `s3`, and
returns `{s3.session_id: [record], s0.session_id: SessionFailure("agent_exit", "...")}`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from silva.turns import Session
from silva.types import ExportRecord, SessionFailure

RUNNER_LOST = "runner_lost"
"""Reason of a session that ended because the process that owns the agents died: no fault of its agent."""
LEFT_OUT = "left_out_by_loop"
"""Reason of a session that its driver did not return."""

SessionResult = list[ExportRecord] | SessionFailure
"""The contexts that a session exports, or why it has none."""
Again = Callable[[Session], Session]
"""Opens a further try in the slot of a session, with its lease."""


class SessionDriver(Protocol):
    """Runs one session to its end, knowing nothing of its group."""

    async def run(self, session: Session) -> list[ExportRecord]:
        """The contexts to train on. Raises SessionFailure, and RunStopped where no further session could run either."""
        ...


class GroupDriver(Protocol):
    """Runs sessions of one group to their ends.

    Consumes Sessions that hold their lease, in the order of their slots; waits for their agents; produces results by
    session id, in any order. A session without a result counts as LEFT_OUT. Where several tries of a slot have
    records, the last counts and the others are left out.
    """

    @property
    def whole_groups(self) -> bool:
        """Whether one call gets all slots of a group. Else each slot has calls of its own, which wait for no other."""
        ...

    async def run(self, sessions: Sequence[Session], again: Again) -> Mapping[str, SessionResult]:
        """Raises SessionFailure where all sessions failed alike, RunStopped where no further session could run."""
        ...


class EachSession:
    """A GroupDriver of agents that know nothing of each other: a SessionDriver, mapped over the sessions."""

    whole_groups = False

    def __init__(self, driver: SessionDriver):
        self._driver = driver

    async def run(self, sessions: Sequence[Session], again: Again) -> Mapping[str, SessionResult]:
        try:
            async with asyncio.TaskGroup() as tasks:
                running = {session.session_id: tasks.create_task(self._result(session)) for session in sessions}
        except ExceptionGroup as faults:
            raise faults.exceptions[0] from faults  # the runner has to see a RunStopped as such
        return {session_id: task.result() for session_id, task in running.items()}

    async def _result(self, session: Session) -> SessionResult:
        try:
            return await self._driver.run(session)
        except SessionFailure as failure:
            return failure
