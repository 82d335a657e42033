"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class _Timer:
    def __init__(self, future: asyncio.Future[None], callback):
        self._is_off = False
        future.add_done_callback(lambda _: self._is_off or callback())
        self._future = future

    def cancel(self) -> None:
        self._is_off = True
        self._future.cancel()


class ManualClock:
    """Sleepers wake in order as `advance` passes their time. Between two of them the event loop runs dry."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def monotonic_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return 1_700_000_000 + self._now_s

    async def sleep(self, seconds: float) -> None:
        await self._after(seconds)

    def call_later(self, seconds: float, callback) -> _Timer:
        return _Timer(self._after(seconds), callback)

    def _after(self, seconds: float) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + max(0.0, seconds), next(self._order), future))
        return future

    async def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        end_s = self._now_s + seconds
        await self.settle()
        while self._sleepers and self._sleepers[0][0] <= end_s:
            self._now_s, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)
                await self.settle()
        self._now_s = end_s
        await self.settle()

    async def settle(self) -> None:
        """Give every task that can run its turn; sockets too."""
        for _ in range(20):
            await asyncio.sleep(0)
        await asyncio.sleep(0.002)

    async def until(self, condition, *, step_s: float = 1.0, most_s: float = 10_000.0) -> None:
        """Move on until the condition holds; fails where it never does."""
        passed_s = 0.0
        while not condition():
            assert passed_s < most_s, "the condition never came true"
            await self.advance(step_s)
            passed_s += step_s
