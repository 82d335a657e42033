"""Time is injected: everything that waits or measures takes a `Clock`."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that only go forward, wall seconds since the epoch, and a sleep that obeys the same time."""

    def monotonic_s(self) -> float: ...
    def wall_s(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's own clock."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
