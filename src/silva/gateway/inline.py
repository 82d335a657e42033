"""Which work of a turn may run on the event loop, and what goes to the worker thread."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

MAX_INLINE_CHARS = 4096
QUICK_S = 0.002
MAX_KINDS = 1024


class Worker:
    """One thread for work that takes time. Small work that proved quick runs at once, on the event loop.

    To wake the thread and be woken by it costs as much as encoding a message of 2 KB takes, so what is small in itself
    stays here; but a template may need long for its first message of a kind, or for every one. So work counts as quick
    where the last small one of its kind took less than QUICK_S of CPU, in the thread or here.
    """

    def __init__(self, name: str):
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._quick: OrderedDict[Hashable, None] = OrderedDict()

    async def run(self, work: Callable[[], T]) -> T:
        """In the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def run_small(self, work: Callable[[], T], *, kind: Hashable, num_chars: int) -> T:
        """Here where it is small and quick, else in the thread. Raises what `work` raises."""
        if num_chars > MAX_INLINE_CHARS:
            return await self.run(work)
        result, spent_s = _timed(work) if kind in self._quick else await self.run(lambda: _timed(work))
        if spent_s > QUICK_S:
            self._quick.pop(kind, None)
        else:
            self._quick[kind] = None
            while len(self._quick) > MAX_KINDS:
                self._quick.popitem(last=False)
        return result

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """A result, and the seconds of this thread's CPU that it took."""
    started_s = time.thread_time()
    return work(), time.thread_time() - started_s
