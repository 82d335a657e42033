"""A live session as its turns need it: what it sent before, its open turns, and the order of its commits."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field

from silva.turns.session import Session
from silva.types import ApiError, RequestRow, TurnReply
from silva.wire import ApiFormat, HistoryCache, ModelRequest

TurnTask = asyncio.Task[TurnReply | ApiError]
log = logging.getLogger("silva.turns")
SESSION_ENDED = ApiError(status=404, code="session_ended", message="this session has ended; it takes no more requests")
"""The answer to every request that comes too late for its session."""
BROKEN = ApiError(status=500, code="internal_error", message="the gateway failed on this request; see its log")
"""The answer where a promise between our own parts is broken."""


@dataclass(kw_only=True, eq=False)
class LiveSession:
    """A session and what only its turns need: the digests of what it sent before, and the order of its commits."""

    session: Session
    """The session itself."""
    commit_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a turn is read and written: one turn at a time."""
    _histories: dict[str, HistoryCache] = field(default_factory=dict[str, HistoryCache])
    """By protocol."""

    def begin_request(self, protocol: str) -> RequestRow:
        """Number and record a new request. Ids have one length, so none is a prefix of another."""
        owner = hashlib.blake2b(self.session.session_id.encode(), digest_size=8).hexdigest()
        record = RequestRow(
            request_id=f"{owner}{len(self.session.requests):08x}",
            protocol=protocol,
            stream=False,
            arrived_s=self.session.since_start_s(),
        )
        self.session.requests.append(record)
        return record

    def history(self, protocol: str) -> HistoryCache:
        return self._histories.setdefault(protocol, HistoryCache())

    def read_request(self, form: ApiFormat, body: bytes, record: RequestRow) -> ModelRequest:
        """The request in a body. Raises RequestError."""
        request = form.parse(body, self.history(form.name))
        record.stream = request.options.stream
        record.ignored_fields = list(request.options.ignored_fields)
        return request

    def begin_turn(self, work: Coroutine[None, None, TurnReply | ApiError]) -> TurnTask:
        """Let `work` make a turn. It is cancelled when the session ends."""
        task = asyncio.create_task(work)
        self.session.open_turns.add(task)
        task.add_done_callback(self.session.open_turns.discard)
        return task

    def complete(self, record: RequestRow, made: RequestRow) -> None:
        """Complete the record of a request that gets a committed turn; `made` is that of the request that began it."""
        if record.http_status is None:
            record.http_status = 200
            record.latency_s = self.session.since_start_s() - record.arrived_s
            record.node_id, record.usage, record.finish_reason = made.node_id, made.usage, made.finish_reason

    def settle(self, record: RequestRow, error: ApiError) -> None:
        """Complete the record of a request that ends in an error, unless the end of the session did so."""
        if record.http_status is None:
            record.http_status = error.status
            self._end_unanswered(record, error.code)

    def unanswered(self, record: RequestRow, code: str) -> None:
        """Complete the record of a request whose client got no answer, or not all of it. An earlier error stays."""
        if record.error_code is None and self.session.ended:
            self.settle(record, SESSION_ENDED)
        elif record.error_code is None:
            self._end_unanswered(record, code)

    def _end_unanswered(self, record: RequestRow, code: str) -> None:
        record.error_code = code
        record.latency_s = self.session.since_start_s() - record.arrived_s


def ended_turn(task: TurnTask, request_id: str) -> TurnReply | ApiError:
    """What became of a turn whose task is done."""
    if task.cancelled():
        return SESSION_ENDED
    failure = task.exception()
    if failure is None:
        return task.result()
    log.error("request %s failed", request_id, exc_info=failure)
    return BROKEN
