"""The timeout of a call to an engine or a server, and the pauses before it is retried."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from silva.types import Clock, EngineFault, Timer

RETRY_DELAYS_S = (0.5, 2.0, 5.0)
"""Seconds before each retry of a failed call."""


@asynccontextmanager
async def answer_in_time(clock: Clock, timeout_s: float, who: str) -> AsyncIterator[None]:
    """Raises EngineFault where the block takes longer than `timeout_s`; `who` names what did not answer."""
    limit = asyncio.timeout(None)
    timer: Timer | None = None
    try:
        async with limit:
            timer = clock.call_later(timeout_s, lambda: limit.reschedule(0))
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise EngineFault(f"{who} gave no answer within {timeout_s:g} s (--engine-timeout-s)") from None
    finally:
        if timer is not None:
            timer.cancel()
