"""uvicorn inside a loop that is already running."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterator

import uvicorn

from silva.gateway.app import MOUNT
from silva.gateway.http import AsgiApp
from silva.gateway.options import GatewayOptions
from silva.gateway.protocol import HttpProtocol
from silva.types import ConfigError, system_reason

KEEP_ALIVE_S = 90
"""Longer than the connection pools of SDKs keep an idle connection: a shorter one would look like lost answers."""
CLOSE_GRACE_S = 2
"""Seconds that open answers get when the server closes."""


class GatewayServer:
    """Serves one ASGI app on the running event loop. Takes over no signal handler."""

    def __init__(self, app: AsgiApp, options: GatewayOptions):
        self._options = options
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        config = uvicorn.Config(
            app,
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_GRACE_S,
            backlog=4096,
        )
        self._server = _Server(config)

    @property
    def port(self) -> int:
        """The bound port."""
        assert self._socket is not None, "the gateway is not listening"
        return self._socket.getsockname()[1]

    @property
    def base_url(self) -> str:
        """What a client is given as its base URL, mount path included."""
        if self._options.gateway_advertised_url is not None:
            return self._options.gateway_advertised_url.rstrip("/")
        host = self._options.gateway_host
        if host in ("0.0.0.0", "::", ""):
            host = "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}{MOUNT}"

    async def start(self) -> None:
        """Listen. Raises ConfigError where the address cannot be taken."""
        self._socket = _bind(self._options.gateway_host, self._options.gateway_port)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="silva-gateway")
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise ConfigError(
                    f"the gateway did not start on {self._options.gateway_host}:{self._options.gateway_port}"
                )
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        """Stop listening; open answers get CLOSE_GRACE_S, then their connections are cut."""
        if self._task is None:
            return
        self._server.stop()
        await self._task
        self._task = None
        await asyncio.gather(*self._server.server_state.tasks, return_exceptions=True)


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers. A stop wakes it; it does not poll ten times a second."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self._stop = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stop.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 1.0)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def require_loopback(host: str) -> None:
    """Raise ConfigError unless only this machine can reach `host`: open sessions have no secret."""
    local = host == "localhost"
    with contextlib.suppress(ValueError):
        local = local or ipaddress.ip_address(host).is_loopback
    if not local:
        raise ConfigError(f"open sessions are for loopback only, but --gateway-host is {host!r}; use 127.0.0.1")


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        # asyncio sets TCP_NODELAY only where the protocol is named. Without it an answer can wait 40 ms for an ACK.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--gateway-host {host!r}, --gateway-port {port} name no address: {system_reason(error)}"
        ) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(
            f"the gateway cannot listen on {host}:{port}: {system_reason(error)}. Choose another --gateway-port, or 0 "
            "for a free one"
        ) from error
    return sock
