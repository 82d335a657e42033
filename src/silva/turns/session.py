"""A session as the serving side sees it: its forest, its gate, its active time and its open requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from silva.forest import SessionForest
from silva.types import AttemptRow, Clock, Mode, RequestRow, SessionInput


class ActiveTime:
    """Seconds that a session was allowed to run: counts only between `resume` and `pause`."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._total_s = 0.0
        self._since_s: float | None = None

    @property
    def running(self) -> bool:
        return self._since_s is not None

    def resume(self) -> None:
        if self._since_s is None:
            self._since_s = self._clock.monotonic_s()

    def pause(self) -> None:
        if self._since_s is not None:
            self._total_s += self._clock.monotonic_s() - self._since_s
            self._since_s = None

    def elapsed_s(self) -> float:
        running = 0.0 if self._since_s is None else self._clock.monotonic_s() - self._since_s
        return self._total_s + running


@dataclass(kw_only=True, eq=False)
class Session:
    """One attempt at one dataset row: one conversation forest, and everything that its turns and its agent left.

    Example: the second try of slot 3 of a group of row 12 has `slot=3, row=12, try_index=1`.
    """

    session_id: str
    """Unique in the run; it is also the credential of the session's requests."""
    group_id: str
    """The group whose sessions share a row."""
    mode: Mode
    """Training or evaluation: decides how turns sample."""
    clock: Clock
    """Source of the session's times."""
    forest: SessionForest
    """Every conversation state of the session."""
    slot: int = 0
    """Place in the group, from 0."""
    try_index: int = 0
    """Number of earlier sessions in the same slot."""
    row: int | None = None
    """Index of the dataset row, None for a session that a client opened."""
    input: SessionInput | None = None
    """What the agent is given, None for a session that a client opened."""
    label: object = None
    """The row's value under --label-key; the agent never sees it."""
    output: bytes | None = None
    """What the agent wrote as its result, None where it wrote nothing."""
    prompt_id: str | None = None
    """The use of the row that the session belongs to."""
    seed_key: str | None = None
    """Names the session in the sampling seeds, the same in every run with the same data order. None: its id does."""
    runtime_group_id: str | None = None
    """The sessions that are leased together; None for the whole group."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Open while the session has a lease. The turn service waits for it before each engine attempt."""
    first_request: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the agent first asks the model."""
    requests: list[RequestRow] = field(default_factory=list[RequestRow])
    """The session's model requests, in order of arrival."""
    attempts: list[AttemptRow] = field(default_factory=list[AttemptRow])
    """Its engine calls, in the order in which they ended."""
    open_turns: set[asyncio.Task[object]] = field(default_factory=set["asyncio.Task[object]"])
    """Turns in progress."""
    ended: bool = False
    """True once every further request is refused."""
    started_s: float = 0.0
    """When the session was made, by its clock."""

    def __post_init__(self) -> None:
        self.active = ActiveTime(self.clock)
        self.started_s = self.clock.monotonic_s()

    def since_start_s(self) -> float:
        return self.clock.monotonic_s() - self.started_s

    def open_gate(self) -> None:
        """Give the lease: requests go on, active time counts."""
        self.active.resume()
        self.gate.set()

    def close_gate(self) -> None:
        """Take the lease back: new attempts wait, active time stops."""
        self.active.pause()
        self.gate.clear()
