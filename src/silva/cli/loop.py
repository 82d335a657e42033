"""Runs a command's coroutine: signals end it in order, so that every owner cleans up."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine

import uvloop


def run_async(main: Callable[[], Coroutine[object, object, object]]) -> int:
    """Run to the end, or until INT or TERM cancels it; returns the exit status: 0 where `main` returns no number.

    The first signal ends the run in order. Later ones change nothing: a clean-up that is cut short would leave
    sessions without an end in the ledger.
    """
    stopped_by: list[signal.Signals] = []

    async def guarded() -> int:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def stop(number: signal.Signals) -> None:
            stopped_by.append(number)
            if len(stopped_by) == 1:
                task.cancel()
            else:
                print("silva: stopping already; ending what runs takes some seconds", file=sys.stderr)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        try:
            result = await main()
            return result if isinstance(result, int) else 0
        except asyncio.CancelledError:
            if stopped_by:
                return 128 + stopped_by[0]
            raise

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(guarded())
