"""A session as the serving side sees it: its forest, its gate, its active time and its open requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from silva.forest.session_forest import SessionForest
from silva.types.clock import Clock
from silva.types.rollout import AttemptRecord, Mode, RequestRecord, SessionInput


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
    """One attempt at one row.

    `input` is what the agent is given, `label` what else its row says (never shown to the agent), `output` what the
    agent wrote as its result; `prompt_id` is the row's use that it belongs to; `seed_key` names it the same way
    in every run with the same data order, so that sampling can be repeated. `runtime_group_id` names the sessions
    that are leased together (None: the whole group). `gate` is open while the session holds a lease: the turn service
    waits on it before each engine attempt. `first_request` is set when the agent asks the model for the first time.
    After `ended` every request is refused.
    """

    session_id: str
    group_id: str
    mode: Mode
    clock: Clock
    forest: SessionForest
    input: SessionInput | None = None
    label: Any = None
    output: bytes | None = None
    prompt_id: str | None = None
    seed_key: str | None = None
    runtime_group_id: str | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    first_request: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[RequestRecord] = field(default_factory=list[RequestRecord])
    attempts: list[AttemptRecord] = field(default_factory=list[AttemptRecord])
    open_turns: set[asyncio.Task[object]] = field(default_factory=set["asyncio.Task[object]"])
    ended: bool = False
    started_s: float = 0.0

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
