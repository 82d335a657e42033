"""One model request over HTTP, from the credential to the last byte."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from silva.gateway.dialect import RETRY_HEADER, ApiError, CountingDialect, Dialect, TurnReply
from silva.gateway.http import (
    MAX_BODY_BYTES,
    BodyTooLarge,
    ClientGone,
    Header,
    Receive,
    Scope,
    Send,
    credential,
    read_request_body,
    send_body,
    send_json,
)
from silva.gateway.sessions import SESSION_ENDED, LiveSession, SessionRegistry
from silva.gateway.sse import stream_turn, wait_turn
from silva.gateway.turns import PreparedTurn, TurnService
from silva.types.clock import Clock
from silva.types.errors import EngineFault, RequestError
from silva.types.rollout import RequestRecord

T = TypeVar("T")
log = logging.getLogger("silva.gateway")

_ENDED = ApiError(status=404, code=SESSION_ENDED, message="this session has ended; it takes no more requests")
_UNKNOWN = ApiError(
    status=401,
    code="invalid_api_key",
    message="missing or unknown session credential; send the session id as 'Authorization: Bearer ID' or 'x-api-key'",
)
_TOO_LARGE = ApiError(
    status=413, code="body_too_large", message=f"the request body is larger than {MAX_BODY_BYTES >> 20} MB"
)
_BROKEN = ApiError(status=500, code="internal_error", message="the gateway failed on this request; see its log")


class ModelEndpoint:
    """Consumes HTTP requests of any dialect, produces exactly one answer each.

    The answer is a turn, committed before its last byte, or one error. A lost client ends its turn uncommitted.
    """

    def __init__(self, registry: SessionRegistry, turns: TurnService, clock: Clock):
        self._registry = registry
        self._turns = turns
        self._clock = clock

    async def serve(self, dialect: Dialect, scope: Scope, receive: Receive, send: Send) -> None:
        live = await self._admit(dialect, scope, receive, send)
        if live is None:
            return
        record = live.begin_request(dialect.name)
        prepared = await self._prepare(dialect, live, record, scope, receive)
        if prepared is None:
            return
        if isinstance(prepared, ApiError):
            _settle(live, record, prepared)
            await _send_error(dialect, prepared, send)
            return
        await self._answer(dialect, live, record, prepared, receive, send)

    async def count(self, dialect: CountingDialect, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer how many tokens a request takes. It is no turn: nothing of it enters the records."""
        live = await self._admit(dialect, scope, receive, send)
        if live is None:
            return

        async def count(body: bytes) -> int:
            request = dialect.parse_count(body, live.history(dialect.name))
            return await self._turns.count_tokens(live, request)

        outcome = await self._read("a token count", live, scope, receive, count)
        if isinstance(outcome, ApiError):
            await _send_error(dialect, outcome, send)
        elif outcome is not None:
            await send_json(send, 200, dialect.render_count(outcome))

    async def _admit(self, dialect: Dialect, scope: Scope, receive: Receive, send: Send) -> LiveSession | None:
        """The session of the request's credential. None: there is none, and the client was told so."""
        token = credential(scope)
        live = self._registry.find(token) if token else None
        if live is None:
            refused = _ENDED if token and self._registry.has_ended(token) else _UNKNOWN
            await self._drain(scope, receive)
            await _send_error(dialect, refused, send)
        return live

    async def _drain(self, scope: Scope, receive: Receive) -> None:
        """Take the body of a refused request off the connection, so that the client can read the refusal."""
        try:
            await read_request_body(scope, receive, limit=0)
        except (BodyTooLarge, ClientGone):
            pass

    async def _prepare(
        self, dialect: Dialect, live: LiveSession, record: RequestRecord, scope: Scope, receive: Receive
    ) -> PreparedTurn | ApiError | None:
        """Read, validate and place a request. None: the client is gone. The body is let go when this returns."""

        async def prepare(body: bytes) -> PreparedTurn:
            request = dialect.parse(body, live.history(dialect.name))
            record.stream = request.options.stream
            record.ignored_fields = list(request.options.ignored_fields)
            return await self._turns.prepare(live, request, record)

        prepared = await self._read(f"request {record.request_id}", live, scope, receive, prepare)
        if prepared is None and not live.session.ended:
            record.error_code = "client_disconnected"
        return prepared

    async def _read(
        self, name: str, live: LiveSession, scope: Scope, receive: Receive, work: Callable[[bytes], Awaitable[T]]
    ) -> T | ApiError | None:
        """Read the body and work on it. None: the client is gone. `name` stands for the request in the log."""
        try:
            body = await read_request_body(scope, receive)
            if live.session.ended:
                return _ENDED
            result = await work(body)
        except ClientGone:
            return None
        except BodyTooLarge:
            return _TOO_LARGE
        except RequestError as error:
            return ApiError(status=error.status, code=error.code, message=str(error), field=error.field)
        except Exception:  # a broken promise of our own is told, logged and recorded like any other end of a request
            log.exception("%s failed inside the gateway", name)
            return _BROKEN
        return _ENDED if live.session.ended else result

    async def _answer(
        self,
        dialect: Dialect,
        live: LiveSession,
        record: RequestRecord,
        prepared: PreparedTurn,
        receive: Receive,
        send: Send,
    ) -> None:
        options = prepared.options
        headers = _turn_headers(record, prepared)
        turn = asyncio.create_task(self._run(live, record, prepared))
        live.session.open_turns.add(turn)
        turn.add_done_callback(live.session.open_turns.discard)
        if options.stream:
            finished = await stream_turn(dialect, options, turn, self._clock, receive, send, headers)
        else:
            finished = await wait_turn(turn, receive)
        if not finished:
            return
        outcome = _outcome(turn, record)
        if isinstance(outcome, TurnReply):
            if options.stream:
                await send_body(send, dialect.stream(options, outcome))
            else:
                await send_json(send, 200, dialect.render(options, outcome), headers)
        elif options.stream:
            failure = replace(
                outcome, request_id=record.request_id, model=options.model, created_s=self._clock.wall_s()
            )
            await send_body(send, dialect.stream_error(failure))
        else:
            await _send_error(dialect, outcome, send, headers)

    async def _run(self, live: LiveSession, record: RequestRecord, prepared: PreparedTurn) -> TurnReply | ApiError:
        """Make the turn and complete its record. A cancelled turn says in its record why."""
        try:
            reply = await self._turns.generate(live, prepared, record)
            record.http_status = 200
            record.latency_s = live.session.since_start_s() - record.arrived_s
            return reply
        except EngineFault as fault:
            error = ApiError(status=503, code="engine_error", message=f"the inference engine failed: {fault}")
            _settle(live, record, error)
            return error
        except asyncio.CancelledError:
            if live.session.ended:
                _settle(live, record, _ENDED)
            else:
                record.error_code = "client_disconnected"
                record.latency_s = live.session.since_start_s() - record.arrived_s
            raise


def _outcome(turn: asyncio.Task[TurnReply | ApiError], record: RequestRecord) -> TurnReply | ApiError:
    if turn.cancelled():
        return _ENDED
    failure = turn.exception()
    if failure is None:
        return turn.result()
    # A broken promise of our own: it is told and logged, and the connection still ends in one answer.
    log.error("request %s failed inside the gateway", record.request_id, exc_info=failure)
    record.http_status, record.error_code = _BROKEN.status, _BROKEN.code
    return _BROKEN


def _settle(live: LiveSession, record: RequestRecord, error: ApiError) -> None:
    if record.http_status is None:  # else the end of the session settled it
        live.settle(record, error.status, error.code)


def _turn_headers(record: RequestRecord, prepared: PreparedTurn) -> tuple[Header, ...]:
    return (
        (b"x-request-id", record.request_id.encode()),
        (b"x-silva-match", prepared.match.encode()),
        (b"x-silva-state", prepared.state.encode()),
        (b"x-silva-repairs", str(prepared.num_repairs).encode()),
    )


async def _send_error(dialect: Dialect, error: ApiError, send: Send, headers: tuple[Header, ...] = ()) -> None:
    if error.status in (401, 404):
        headers = (*headers, RETRY_HEADER)
    await send_json(send, error.status, dialect.error(error), headers)
