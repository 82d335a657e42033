"""Time is injected: everything that waits or measures takes a `Clock`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that was put off."""

    def cancel(self) -> object:
        """Let it not happen. Changes nothing afterwards."""
        ...


class Clock(Protocol):
    """Seconds that only go forward, wall seconds since the epoch, and waits that obey the same time.

    `call_later` makes no task: it is for a limit that is rarely reached.
    """

    def monotonic_s(self) -> float: ...
    def wall_s(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...
    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer: ...


class SystemClock:
    """The machine's own clock."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, callback)
