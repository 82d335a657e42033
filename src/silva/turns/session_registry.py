"""Live sessions by credential, and which sessions ended."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass

from silva.forest import SessionForest
from silva.inference import Engine
from silva.turns.live_session import SESSION_ENDED, LiveSession
from silva.turns.session import Session
from silva.types import Clock, JsonObject, Mode

MAX_REMEMBERED = 1 << 16
"""Ended sessions whose late requests are answered as such. Beyond it the oldest is forgotten."""
OPEN_SESSION_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")

FinishCallback = Callable[[Session, bytes], Awaitable[JsonObject]]
"""Called with a session that its client finished (it takes no more requests) and the raw body."""


@dataclass(eq=False)
class SessionRegistry:
    """Opens, finds and ends sessions; their only owner.

    With `open_sessions` an unknown credential that matches OPEN_SESSION_KEY opens a session with that id; `on_open` is
    called with each session that begins in this way and has to grant its lease.
    """

    engine: Engine
    """Frees what it cached for a session that ends."""
    clock: Clock
    """Times the sessions."""
    _: KW_ONLY
    open_sessions: bool = False
    """An unknown credential of a sane form opens a session."""
    on_open: Callable[[Session], None] | None = None
    """Called with each session that began in this way; it has to grant the lease."""
    on_finish: FinishCallback | None = None
    """What becomes of a session that its client finished."""

    def __post_init__(self) -> None:
        self._live: dict[str, LiveSession] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._closed = False

    @property
    def allows_open_sessions(self) -> bool:
        return self.open_sessions

    @property
    def live_ids(self) -> list[str]:
        return list(self._live)

    def open(self, session_id: str, group_id: str, mode: Mode) -> Session:
        """Open a new session with a closed gate. Its id is its credential and is never used twice."""
        assert session_id not in self._live and session_id not in self._ended, f"session id {session_id} used twice"
        session = Session(session_id=session_id, group_id=group_id, mode=mode, clock=self.clock, forest=SessionForest())
        self._live[session_id] = LiveSession(session=session)
        return session

    def find(self, credential: str) -> LiveSession | None:
        """The live session of a credential. May open one where sessions are open."""
        live = self._live.get(credential)
        if live is not None or not self.open_sessions or self.has_ended(credential):
            return live
        if OPEN_SESSION_KEY.fullmatch(credential) is None:
            return None
        session = self.open(credential, credential, "train")
        if self.on_open is not None:
            self.on_open(session)
        return self._live[credential]

    def has_ended(self, session_id: str) -> bool:
        """Whether this session takes no more requests: it ended, or all sessions did because the server stops."""
        return session_id in self._ended or (self._closed and session_id not in self._live)

    async def end(self, session_id: str) -> Session | None:
        """Refuse new requests, cancel the open ones, free the engine's cache, forget. None where no such session lives.

        When this returns no turn of the session runs and its records are complete.
        """
        live = self._live.pop(session_id, None)
        if live is None:
            return None
        session = live.session
        session.ended = True
        self._ended[session_id] = None
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        turns = list(session.open_turns)
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)
        for record in session.requests:
            if record.error_code is None:  # still on its way in: it will be refused
                live.settle(record, SESSION_ENDED)
        await self.engine.close_session(session_id)
        return session

    async def finish(self, session_id: str, body: bytes) -> JsonObject | None:
        """End an open session because its client asks for it, and pass it on. None where no such session lives."""
        session = await self.end(session_id)
        if session is None:
            return None
        if self.on_finish is None:
            return {"status": "cancelled", "reason": "no_export", "num_samples": 0}
        return await self.on_finish(session, body)

    async def close(self) -> list[Session]:
        """End every session that still lives. Returns them. From now on no request opens one."""
        self._closed = True
        ended = [await self.end(session_id) for session_id in list(self._live)]
        return [session for session in ended if session is not None]
