"""The embedded HTTP server: ports, closing, signals."""

from __future__ import annotations

import asyncio
import signal
import socket

import pytest
from gateway_serve import serving, until
from raw_http import RawClient

from silva.codec import TurnCodec
from silva.gateway.http import send_json
from silva.gateway.options import GatewayOptions
from silva.gateway.server import GatewayServer, require_loopback
from silva.types.errors import ConfigError

HI = [{"role": "user", "content": "hi"}]


async def app(scope, receive, send) -> None:
    await send_json(send, 200, {})


async def test_a_taken_port_is_a_config_error_with_the_address():
    first = GatewayServer(app, GatewayOptions())
    await first.start()
    try:
        second = GatewayServer(app, GatewayOptions(gateway_port=first.port))
        with pytest.raises(ConfigError, match=f"127.0.0.1:{first.port}"):
            await second.start()
        await second.close()
    finally:
        await first.close()


@pytest.mark.parametrize(("host", "port"), [("no such host", 0), ("127.0.0.1", 70000)])
async def test_an_impossible_address_is_a_config_error(host: str, port: int):
    with pytest.raises(ConfigError):
        await GatewayServer(app, GatewayOptions(gateway_host=host, gateway_port=port)).start()


async def test_connections_do_not_wait_for_acknowledgements():
    seen: list[int] = []

    async def looking(scope, receive, send) -> None:
        transport = next(iter(server._server.server_state.connections)).transport
        seen.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        await send_json(send, 200, {})

    server = GatewayServer(looking, GatewayOptions())
    await server.start()
    client = RawClient(server.port, "s")
    assert await client.post({}) == (200, b"{}")
    await server.close()
    assert seen and seen[0] != 0


async def test_base_url_and_advertised_url():
    server = GatewayServer(app, GatewayOptions(gateway_host="0.0.0.0"))
    await server.start()
    assert server.base_url == f"http://127.0.0.1:{server.port}/agentic_api"
    await server.close()
    assert GatewayServer(app, GatewayOptions(gateway_advertised_url="http://gw:1/x/")).base_url == "http://gw:1/x"


def test_open_sessions_want_loopback():
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        require_loopback(host)
    for host in ("0.0.0.0", "10.0.0.1", "example.org", ""):
        with pytest.raises(ConfigError, match="loopback"):
            require_loopback(host)


async def test_signal_handlers_are_left_alone():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    server = GatewayServer(app, GatewayOptions())
    await server.start()
    assert {number: signal.getsignal(number) for number in before} == before
    await server.close()
    assert {number: signal.getsignal(number) for number in before} == before


async def test_closing_does_not_hang_on_idle_or_waiting_connections(codec: TurnCodec):
    async with serving(codec, [{"error": "hang"}]) as serve:
        idle = RawClient(serve.server.port, "idle")
        await idle.send({"messages": []})
        assert (await idle.head())[0] == 400
        waiting = [RawClient(serve.server.port, "w") for _ in range(3)]
        for number, client in enumerate(waiting):
            await client.send({"messages": HI, "stream": number == 0})
        await until(lambda: len(serve.calls("w")) == 3)
        await asyncio.wait_for(serve.registry.close(), 20)
        await asyncio.wait_for(serve.server.close(), 20)
        assert serve.engine.usage().num_running == 0
        assert (await waiting[1].head())[0] == 404


@pytest.mark.slow
async def test_closing_cuts_turns_of_sessions_that_nobody_ended(codec: TurnCodec):
    async with serving(codec, [{"error": "hang"}]) as serve:
        client = RawClient(serve.server.port, "w")
        await client.send({"messages": HI})
        await until(serve.calls)
        await asyncio.wait_for(serve.server.close(), 30)
        assert serve.engine.usage().num_running == 0
        assert not serve.session("w").open_turns
        assert serve.forest("w").nodes == []
