"""The gateway's ASGI application: its routes, and the answers that need no model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from silva.gateway.chat import ChatDialect
from silva.gateway.dialect import CountingDialect, Dialect
from silva.gateway.exchange import ModelEndpoint
from silva.gateway.http import (
    BodyTooLarge,
    ClientGone,
    Header,
    Receive,
    Scope,
    Send,
    credential,
    header,
    read_request_body,
    send_json,
)
from silva.gateway.messages import MessagesDialect
from silva.gateway.options import GatewayOptions
from silva.gateway.responses import ResponsesDialect
from silva.turns import SessionRegistry, TurnService
from silva.types import ApiError, Clock, JsonObject

MOUNT = "/agentic_api"
MODEL_NAME = "model"
_FINISH = re.compile(r"sessions/([^/]+)/finish")
_VERSION = "v1"
_MAX_VERSIONS = 2


class GatewayApp:
    """ASGI callable. Model routes lie under `/agentic_api`, with no version prefix, `/v1` or a doubled one."""

    def __init__(
        self,
        registry: SessionRegistry,
        turns: TurnService,
        clock: Clock,
        options: GatewayOptions,
    ):
        dialects: Sequence[Dialect] = (
            ChatDialect(),
            ResponsesDialect(options.agentic_responses_events),
            MessagesDialect(),
        )
        self._registry = registry
        self._endpoint = ModelEndpoint(registry, turns, clock, options)
        self._dialects = {dialect.route: dialect for dialect in dialects}
        self._counting = {it.count_route: it for it in dialects if isinstance(it, CountingDialect)}
        self._fallback = dialects[0]
        self._routes = ", ".join(f"POST {MOUNT}/v1/{route}" for route in (*self._dialects, *self._counting))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["path"]
        mounted = path == MOUNT or path.startswith(MOUNT + "/")
        resource = _resource(path.removeprefix(MOUNT) if mounted else path)
        if resource in ("", "health", "api/hello") and method in ("GET", "HEAD"):
            await send_json(send, 200, {"status": "ok"})
        elif not mounted:
            await self._refuse(404, "not_found", f"no route {path}; the API lies under {MOUNT}", send, resource)
        elif resource in self._dialects or resource in self._counting:
            await self._model_route(resource, scope, receive, send)
        elif resource == "models" or resource.startswith("models/"):
            await send_json(send, 200, _models(resource))
        elif (found := _FINISH.fullmatch(resource)) and self._registry.allows_open_sessions:
            await self._finish(found.group(1), scope, receive, send)
        else:
            await self._refuse(404, "not_found", f"no route {path}; there are {self._routes}", send, resource)

    async def _model_route(self, resource: str, scope: Scope, receive: Receive, send: Send) -> None:
        counting = self._counting.get(resource)
        dialect = counting or self._dialects[resource]
        if scope["method"] == "POST":
            if counting is not None:
                await self._endpoint.count(counting, scope, receive, send)
            else:
                await self._endpoint.serve(dialect, scope, receive, send)
            return
        headers: tuple[Header, ...] = ((b"allow", b"POST"),)
        if (header(scope, b"upgrade") or "").lower() == "websocket":
            error = ApiError(status=426, code="no_websocket", message="websockets are not supported; use HTTP POST")
            headers = (*headers, (b"upgrade", b"HTTP/1.1"))
        else:
            message = f"{scope['method']} is not allowed here; use POST"
            error = ApiError(status=405, code="method_not_allowed", message=message)
        await send_json(send, error.status, dialect.error(error), headers)

    async def _finish(self, session_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_request_body(scope, receive)
        except ClientGone:
            return
        except BodyTooLarge:
            await self._refuse(413, "body_too_large", "the output document is too large", send)
            return
        if scope["method"] != "POST":
            await self._refuse(405, "method_not_allowed", "use POST", send)
        elif (credential(scope) or session_id) != session_id:
            await self._refuse(401, "invalid_api_key", f"the credential is not that of session {session_id}", send)
        elif (answer := await self._registry.finish(session_id, body)) is None:
            await self._refuse(404, "session_ended", f"no open session {session_id}", send)
        else:
            await send_json(send, 200, answer)

    async def _refuse(self, status: int, code: str, message: str, send: Send, resource: str = "") -> None:
        """Send an error in the shape of the protocol that owns the first part of the path."""
        dialect = self._dialects.get(resource.partition("/")[0], self._fallback)
        body = dialect.error(ApiError(status=status, code=code, message=message))
        await send_json(send, status, body, ((b"x-should-retry", b"false"),))


def _resource(path: str) -> str:
    """The path without version prefixes and empty parts, which come from joined base URLs."""
    parts = [part for part in path.split("/") if part]
    for _ in range(_MAX_VERSIONS):
        if parts[:1] == [_VERSION]:
            del parts[0]
    return "/".join(parts)


def _models(resource: str) -> JsonObject:
    name = resource.removeprefix("models").strip("/") or MODEL_NAME
    model = {"id": name, "object": "model", "created": 0, "owned_by": "silva"}
    return model if "/" in resource else {"object": "list", "data": [model]}
