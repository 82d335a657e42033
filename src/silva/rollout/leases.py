"""Permission to run: the gates of sessions, which only this module opens and closes.

    grant        park           resume         release
      |  may run   |   waits      |   may run     |  ended
    --+------------+--------------+---------------+-->
      gate open      gate closed    gate open       gate closed, forgotten

A session's active time runs exactly while its gate is open. A request that arrives at a closed gate is held, not
refused, so an agent never notices.
"""

from __future__ import annotations

from silva.inference import Engine, EngineUsage
from silva.turns import Session


class Leases:
    """Grants, parks, resumes and releases. Consumes sessions; wakes the turns that wait at their gates."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._held: dict[str, Session] = {}
        self._parked: set[str] = set()

    @property
    def num_running(self) -> int:
        """Sessions that may run now."""
        return len(self._held) - len(self._parked)

    @property
    def num_parked(self) -> int:
        """Sessions whose lease was taken back for a while."""
        return len(self._parked)

    def usage(self) -> EngineUsage:
        """What the engine carries now: the ground on which to grant, park and resume."""
        return self._engine.usage()

    def grant(self, session: Session) -> None:
        """The first lease of a session."""
        assert session.session_id not in self._held, f"session {session.session_id} holds a lease already"
        self._held[session.session_id] = session
        session.open_gate()

    def park(self, session: Session) -> None:
        """New attempts of the session wait from here on; those that run go on."""
        assert session.session_id in self._held, f"session {session.session_id} holds no lease"
        self._parked.add(session.session_id)
        session.close_gate()

    def resume(self, session: Session) -> None:
        """What was held at the gate goes on."""
        self._parked.remove(session.session_id)
        session.open_gate()

    def release(self, session: Session) -> None:
        """The session ended. May come twice, and without a lease."""
        self._held.pop(session.session_id, None)
        self._parked.discard(session.session_id)
        session.close_gate()
