"""One client's answer: it waits for a turn, sends heartbeats meanwhile, then sends the whole turn in one burst.

stream   head and connection frame at once ... heartbeat every 15 s ... all events of the turn
JSON     nothing for 200 s, then the head and white space every 15 s ... the document
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import msgspec

from silva.gateway.dialect import RETRY_HEADER, Dialect
from silva.gateway.held import HeldTurn
from silva.gateway.http import JSON_TYPE, STREAM_HEADERS, Delivery, Header, Send, send_body, send_json, send_start
from silva.turns import TurnTask
from silva.types import ApiError, Clock, RequestRow, TurnOptions, TurnReply

HEARTBEAT_S = 15.0
"""Seconds between heartbeats."""
SILENT_JSON_S = 200.0
"""How long a JSON answer waits without a byte. Some clients give up after 300 s without a head."""


@dataclass(kw_only=True, slots=True)
class Answer:
    """Consumes a held turn, produces one answer on one connection; woken by the turn and by the client's loss.

    `record` is that of this request, which may have joined the turn; `outcome` reads the turn when it has ended.
    """

    dialect: Dialect
    """The protocol of the connection."""
    options: TurnOptions
    """What the request asked for."""
    held: HeldTurn
    """The turn that it waits for."""
    record: RequestRow
    """The row of this request, which may have joined the turn."""
    clock: Clock
    """Paces the heartbeats."""
    data_heartbeat_s: float | None
    """Seconds between heartbeats sent as data; None: none."""
    send: Send
    """Writes to the connection."""
    delivery: Delivery
    """Whether the client is still there."""
    outcome: Callable[[], TurnReply | ApiError]
    """Reads the turn when it has ended."""
    _num_early: int = field(default=0, init=False)
    _begun: bool = field(default=False, init=False)

    async def deliver(self) -> bool:
        """Answer. Returns False where the client is gone or did not get the whole answer."""
        with self.held.wait(self.record):
            whole = await self._deliver() and not self.delivery.lost
            if whole:
                self.held.delivered(self.delivery)
            return whole

    async def _deliver(self) -> bool:
        if not await self._until(self.held.ready):
            return False
        if self.held.head is not None:
            return await (self._stream() if self.options.stream else self._json())
        outcome = self.outcome()
        assert isinstance(outcome, ApiError), "a turn that was not placed has no reply"
        await self._send_error(outcome)
        return True

    async def _stream(self) -> bool:
        """Send status 200 and the connection frame now, heartbeats while the turn is made, then every event."""
        await send_start(self.send, 200, (*STREAM_HEADERS, *self._headers()))
        await send_body(self.send, self.dialect.connected_frame, more=True)
        heartbeats = [self._every(HEARTBEAT_S, lambda: self.dialect.heartbeat_frame)]
        if self.data_heartbeat_s is not None:
            heartbeats.append(self._every(self.data_heartbeat_s, self._data_heartbeat))
        async with _meanwhile(*heartbeats):
            if not await self._until(self.held.task):
                return False
        outcome = self.outcome()
        if isinstance(outcome, TurnReply):
            frames = self.dialect.stream(self.options, outcome, self._num_early)
        else:
            failure = replace(
                outcome,
                request_id=self.held.record.request_id,
                model=self.options.model,
                created_s=self.held.created_s,
            )
            frames = self.dialect.stream_error(failure, self._num_early)
        await send_body(self.send, frames)
        return True

    async def _json(self) -> bool:
        """Send one JSON document. After SILENT_JSON_S its head goes out, then white space until the document is there.

        An error cannot be sent behind such a head. The connection is cut in the middle of the answer instead, and a
        client that asks again gets the error.
        """
        late: list[asyncio.Task[None]] = []
        timer = self.clock.call_later(SILENT_JSON_S, lambda: late.append(asyncio.create_task(self._whiten())))
        try:
            if not await self._until(self.held.task):
                return False
        finally:
            timer.cancel()
            await _end(late)
        outcome = self.outcome()
        if isinstance(outcome, ApiError):
            if not self._begun:
                await self._send_error(outcome, self._match_headers())
                return True
            self.delivery.abort()
            await self.delivery.gone()
            return False
        document = self.dialect.reply(self.options, outcome)
        if self._begun:
            await send_body(self.send, msgspec.json.encode(document))
        else:
            await send_json(self.send, 200, document, self._headers())
        return True

    async def _send_error(self, error: ApiError, headers: tuple[Header, ...] = ()) -> None:
        await send_error(self.dialect, replace(error, request_id=self.record.request_id), self.send, headers)

    async def _until(self, event: asyncio.Future[tuple[Header, ...] | None] | TurnTask) -> bool:
        """Wait for `event`. Returns False where the client went first."""
        gone = self.delivery.gone()
        if not event.done() and not gone.done():
            await asyncio.wait((event, gone), return_when=asyncio.FIRST_COMPLETED)
        return event.done()

    async def _every(self, seconds: float, frame: Callable[[], bytes]) -> None:
        while True:
            await self.clock.sleep(seconds)
            await send_body(self.send, frame(), more=True)

    async def _whiten(self) -> None:
        await send_start(self.send, 200, (JSON_TYPE, *self._headers()))
        self._begun = True
        await send_body(self.send, b" ", more=True)
        await self._every(HEARTBEAT_S, lambda: b" ")

    def _data_heartbeat(self) -> bytes:
        frame = self.dialect.data_heartbeat(
            self.options, self.held.record.request_id, self.held.created_s, self._num_early
        )
        self._num_early += 1
        return frame

    def _headers(self) -> tuple[Header, ...]:
        return (*_id_headers(self.dialect, self.record.request_id), *self._match_headers())

    def _match_headers(self) -> tuple[Header, ...]:
        head = self.held.head
        assert head is not None and self.record.match is not None
        return ((b"x-silva-match", self.record.match.encode()), *head)


async def send_error(dialect: Dialect, error: ApiError, send: Send, headers: tuple[Header, ...] = ()) -> None:
    """Send an error as the whole answer, in the protocol's own shape."""
    if error.status in (401, 404):
        headers = (*headers, RETRY_HEADER)
    headers = (*headers, *_id_headers(dialect, error.request_id))
    await send_json(send, error.status, dialect.error(error), headers)


def _id_headers(dialect: Dialect, request_id: str) -> tuple[Header, ...]:
    return tuple((name, request_id.encode()) for name in dialect.request_id_headers) if request_id else ()


@asynccontextmanager
async def _meanwhile(*works: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Do some work while the block runs. The work has ended when the block has."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)
