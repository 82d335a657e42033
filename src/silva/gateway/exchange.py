"""One model request over HTTP, from the credential to the last byte."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

from silva.gateway.answer import Answer, send_error
from silva.gateway.dialect import CountingDialect, Dialect
from silva.gateway.held import Evidence, HeldTurn, HeldTurns, body_digest
from silva.gateway.http import (
    MAX_BODY_BYTES,
    BodyTooLarge,
    ClientGone,
    Receive,
    Scope,
    Send,
    credential,
    delivery_of,
    read_request_body,
    send_json,
)
from silva.gateway.options import GatewayOptions
from silva.turns import BROKEN, SESSION_ENDED, LiveSession, SessionRegistry, TurnService, ended_turn
from silva.types import ApiError, Clock, RequestError, RequestRow, TurnReply
from silva.wire import ModelRequest

T = TypeVar("T")
log = logging.getLogger("silva.gateway")
CLIENT_GONE, STOPPED = "client_disconnected", "server_stopped"
"""Error codes of requests that got no answer."""


def _unknown(message: str) -> ApiError:
    where = "as 'Authorization: Bearer ID' or 'x-api-key: ID'"
    return ApiError(status=401, code="invalid_api_key", message=f"{message} {where}")


_NO_KEY = _unknown("the request carries no key; send the session id (RELAX_SESSION_ID)")
_UNKNOWN = _unknown("the key is not that of a session; send the session id (RELAX_SESSION_ID)")
_NO_OPEN_ID = _unknown(
    "the key cannot name a session; send up to 128 letters, digits and . _ : - that begin with a letter or digit,"
)
_TOO_LARGE = ApiError(
    status=413, code="body_too_large", message=f"the request body is larger than {MAX_BODY_BYTES >> 20} MB"
)


@dataclass(eq=False)
class ModelEndpoint:
    """Consumes HTTP requests of any dialect, produces exactly one answer for each.

    The answer is a turn, committed before its last byte, or one error. A request that repeats another one whose reply
    was lost joins that turn. A turn whose clients are all gone is kept for a while and then ends uncommitted, or ends
    at once when its session asks for something else.
    """

    registry: SessionRegistry
    """Finds the session of a credential."""
    turns: TurnService
    """Makes the turns."""
    clock: Clock
    """Times graces and heartbeats."""
    options: GatewayOptions
    """Heartbeats and graces."""

    def __post_init__(self) -> None:
        self._held: WeakKeyDictionary[LiveSession, HeldTurns] = WeakKeyDictionary()
        """The turns of each live session that can be joined."""

    async def serve(self, dialect: Dialect, scope: Scope, receive: Receive, send: Send) -> None:
        live = await self._admit(dialect, scope, receive, send)
        if live is None:
            return
        record = live.begin_request(dialect.name)

        async def parse(body: bytes) -> tuple[ModelRequest, bytes]:
            request = live.read_request(dialect, body, record)
            root = live.session.forest.root_of(request.conversation)
            return request, body_digest(dialect.name, root, request.options, self.turns.identify(request)[0])

        try:
            read = await self._read(f"request {record.request_id}", live, scope, receive, parse)
        except asyncio.CancelledError:
            live.unanswered(record, STOPPED)
            delivery_of(scope).abort()
            raise
        if isinstance(read, tuple):
            options, held = read[0].options, self._join_or_begin(live, record, *read, Evidence.of(scope))
            del read  # so that the body is freed when the turn is placed
            answer = Answer(
                dialect=dialect,
                options=options,
                held=held,
                record=record,
                clock=self.clock,
                data_heartbeat_s=self.options.agentic_sse_data_heartbeat_s,
                send=send,
                delivery=delivery_of(scope),
                outcome=partial(self._outcome, live, held, record),
            )
            await self._deliver(live, record, answer)
        elif read is not None:
            live.settle(record, read)
            await send_error(dialect, replace(read, request_id=record.request_id), send)
        else:
            live.unanswered(record, CLIENT_GONE)

    async def count(self, dialect: CountingDialect, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer how many tokens a request takes. This is no turn and leaves no row."""
        live = await self._admit(dialect, scope, receive, send)
        if live is None:
            return

        async def count(body: bytes) -> int:
            request = dialect.parse_count(body, live.history(dialect.name))
            return await self.turns.count_tokens(live, request)

        outcome = await self._read("a token count", live, scope, receive, count)
        if isinstance(outcome, ApiError):
            await send_error(dialect, outcome, send)
        elif outcome is not None:
            await send_json(send, 200, dialect.count(outcome))

    async def _admit(self, dialect: Dialect, scope: Scope, receive: Receive, send: Send) -> LiveSession | None:
        """The session of the request's credential; None where there is none, after the client got the refusal."""
        token = credential(scope)
        live = self.registry.find(token) if token else None
        if live is None:
            refused = self._refusal(token)
            # Take the body off the connection first: a client that is still writing would not read the refusal.
            with suppress(BodyTooLarge, ClientGone):
                await read_request_body(scope, receive, limit=0)
            await send_error(dialect, refused, send)
        return live

    def _refusal(self, token: str | None) -> ApiError:
        """Why this key is refused."""
        if not token:
            return _NO_KEY
        if self.registry.has_ended(token):
            return SESSION_ENDED
        return _NO_OPEN_ID if self.registry.allows_open_sessions else _UNKNOWN

    async def _read(
        self, name: str, live: LiveSession, scope: Scope, receive: Receive, work: Callable[[bytes], Awaitable[T]]
    ) -> T | ApiError | None:
        """Read the body and work on it. Returns None where the client is gone. `name` is the request in the log."""
        try:
            body = await read_request_body(scope, receive)
            if live.session.ended:
                return SESSION_ENDED
            result = await work(body)
        except ClientGone:
            return None
        except BodyTooLarge:
            return _TOO_LARGE
        except RequestError as error:
            return ApiError.of(error)
        except Exception:  # a broken promise of our own is answered, logged and recorded like any other error
            log.exception("%s failed inside the gateway", name)
            return BROKEN
        return SESSION_ENDED if live.session.ended else result

    def _join_or_begin(
        self, live: LiveSession, record: RequestRow, request: ModelRequest, asked: bytes, evidence: Evidence
    ) -> HeldTurn:
        """The turn that this request repeats, else a new one."""
        turns = self._held.setdefault(live, HeldTurns())
        held = turns.find(asked, evidence)
        if held is not None:
            record.match = "join"
            self.turns.counters["match_join"] += 1
            return held
        self.turns.counters["repeated_without_evidence"] += turns.knows(asked)
        for abandoned in turns.abandoned():
            self.turns.counters["abandoned_turn"] += 1
            abandoned.drop()
        held = HeldTurn(asked=asked, evidence=evidence, record=record, created_s=self.clock.wall_s())
        held.begin(live.begin_turn(self.turns.run(live, request, record, held)))
        turns.add(held)
        return held

    def _outcome(self, live: LiveSession, held: HeldTurn, record: RequestRow) -> TurnReply | ApiError:
        """The outcome of an ended turn, noted in the row of one request that waited for it."""
        outcome = ended_turn(held.task, held.record.request_id)
        if isinstance(outcome, ApiError):
            live.settle(record, outcome)
        else:
            live.complete(record, held.record)
        return outcome

    async def _deliver(self, live: LiveSession, record: RequestRow, answer: Answer) -> None:
        held = answer.held
        try:
            if await answer.deliver():
                if not held.is_made:
                    self._held[live].forget(held)  # an error is delivered once; asking again starts a new turn
            else:
                live.unanswered(record, CLIENT_GONE)
                await self._keep(held)
        except asyncio.CancelledError:
            live.unanswered(record, STOPPED)
            answer.delivery.abort()  # the server would write an error behind what was already sent
            if held.is_abandoned:
                held.drop()
                await asyncio.gather(held.task, return_exceptions=True)
            raise

    async def _keep(self, held: HeldTurn) -> None:
        """Keep a turn without a client for a while. It ends uncommitted unless somebody asks for it again."""
        if not held.is_abandoned:
            return
        timer = asyncio.ensure_future(self.clock.sleep(self.options.agentic_disconnect_grace_s))
        asked = asyncio.ensure_future(held.wanted.wait())
        try:
            await asyncio.wait({timer, asked, held.task}, return_when=asyncio.FIRST_COMPLETED)
            if timer.done() and held.is_abandoned:
                held.drop()
                await asyncio.gather(held.task, return_exceptions=True)
        finally:
            timer.cancel()
            asked.cancel()
            await asyncio.gather(timer, asked, return_exceptions=True)
