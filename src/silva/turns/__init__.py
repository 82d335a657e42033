"""The turn service: one model request of a live session becomes one committed turn.

Consumes canonical requests (`wire.model_request.ModelRequest`); produces replies or errors as values, and nodes in the
session's forest. Two doors use it alike: HTTP (`gateway`) and callers in this process (`session_client.py`).

Invariant: a turn is committed whole or not at all, by one writer per session.

Start with `turn_service.py` (prepare, sample, commit). `placing.py` forms the prompt, `reading.py` the reply,
`engine_client.py` makes the attempts, `session_registry.py` owns the live sessions.
"""

from silva.turns.live_session import BROKEN, SESSION_ENDED, LiveSession, TurnTask, ended_turn
from silva.turns.options import TurnServiceOptions
from silva.turns.session import Session
from silva.turns.session_client import SessionClient
from silva.turns.session_registry import SessionRegistry
from silva.turns.turn_service import PreparedTurn, TurnService

__all__ = [
    "BROKEN", "SESSION_ENDED", "LiveSession", "PreparedTurn", "Session", "SessionClient", "SessionRegistry",
    "TurnService", "TurnServiceOptions", "TurnTask", "ended_turn",
]  # fmt: skip
