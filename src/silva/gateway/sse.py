"""Buffered SSE: the stream opens at once, breathes while the turn is made, and tells the whole turn in one burst."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from silva.gateway.dialect import ApiError, Dialect, TurnOptions, TurnReply
from silva.gateway.http import STREAM_HEADERS, Header, Receive, Send, send_body, send_start, wait_disconnect
from silva.types.clock import Clock
from silva.types.messages import JsonObject

T = TypeVar("T")
HEARTBEAT_S = 15.0


def data_frame(value: JsonObject, event: str | None = None) -> bytes:
    """One event with a JSON object as its data."""
    named = b"" if event is None else b"event: " + event.encode() + b"\n"
    return named + b"data: " + msgspec.json.encode(value) + b"\n\n"


async def wait_turn(turn: asyncio.Task[T], receive: Receive) -> bool:
    """Wait until the turn has ended (True) or the client is gone (False; the turn was cancelled and has ended)."""
    return await _Watch(turn, receive).wait()


async def stream_turn(
    dialect: Dialect,
    options: TurnOptions,
    turn: asyncio.Task[TurnReply | ApiError],
    clock: Clock,
    receive: Receive,
    send: Send,
    headers: tuple[Header, ...],
) -> bool:
    """Status 200 and the connection frame now, a heartbeat every 15 s; leaves the final frames to the caller.

    Returns as `wait_turn` does.
    """
    await send_start(send, 200, (*STREAM_HEADERS, *headers))
    await send_body(send, dialect.connected_frame, more=True)
    watch = _Watch(turn, receive)
    breath = asyncio.create_task(_breathe(dialect, clock, send))
    try:
        return await watch.wait()
    finally:
        breath.cancel()
        await asyncio.gather(breath, return_exceptions=True)


async def _breathe(dialect: Dialect, clock: Clock, send: Send) -> None:
    while True:
        await clock.sleep(HEARTBEAT_S)
        await send_body(send, dialect.heartbeat_frame, more=True)


class _Watch:
    """Waits for a turn and for the loss of its client at the same time. Owns the turn: it never outlives the wait."""

    def __init__(self, turn: asyncio.Task[T], receive: Receive):
        self._turn = turn
        self._receive = receive

    async def wait(self) -> bool:
        gone = asyncio.create_task(wait_disconnect(self._receive))
        try:
            await asyncio.wait({self._turn, gone}, return_when=asyncio.FIRST_COMPLETED)
            return self._turn.done()
        finally:
            gone.cancel()
            self._turn.cancel()
            await asyncio.gather(gone, self._turn, return_exceptions=True)
