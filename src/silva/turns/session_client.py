"""The model API of one session for a caller in this process: a request body in, a reply document out, no HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import msgspec

from silva.turns.live_session import SESSION_ENDED, LiveSession, ended_turn
from silva.turns.turn_service import TurnService
from silva.types import ApiError, JsonObject, RequestError
from silva.wire import ApiFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionClient:
    """Asks the turn service as an HTTP client of the session would, with the same ids, records and documents.

    A call is always a new turn: nothing between caller and service can lose a reply.

    Example: `status, reply = await client.ask({"messages": [{"role": "user", "content": "hi"}]})` gives `200` and the
    Chat document, or `400` and the error document.
    """

    turns: TurnService
    """Makes the turns."""
    live: LiveSession
    """The session, from `SessionRegistry.find`."""
    form: ApiFormat
    """The protocol of bodies and replies, one of `FORMATS`."""

    async def ask(self, body: JsonObject) -> tuple[int, JsonObject]:
        """Status and document of the answer. Where the caller is cancelled the turn is not committed."""
        if self.live.session.ended:
            return SESSION_ENDED.status, self.form.error(SESSION_ENDED)
        record = self.live.begin_request(self.form.name)
        try:
            request = self.live.read_request(self.form, msgspec.json.encode(body), record)
        except RequestError as error:
            outcome = ApiError.of(error)
        else:
            options = request.options
            task = self.live.begin_turn(self.turns.run(self.live, request, record))
            del request
            try:
                await asyncio.wait({task})
            finally:
                if not task.done():
                    task.cancel()
                    self.live.unanswered(record, "caller_cancelled")
            outcome = ended_turn(task, record.request_id)
            if not isinstance(outcome, ApiError):
                return 200, msgspec.json.decode(msgspec.json.encode(self.form.reply(options, outcome)))
        self.live.settle(record, outcome)
        return outcome.status, self.form.error(replace(outcome, request_id=record.request_id))
