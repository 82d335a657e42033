"""What is written down of the traffic, and what becomes of it where it cannot be."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from gateway_serve import Json, serving

from silva.codec import TurnCodec
from silva.export.recordings import read_recording
from silva.gateway.http import DELIVERY, Delivery, Receive, Scope, Send, send_json
from silva.gateway.options import GatewayOptions
from silva.gateway.recorder import Recorder
from silva.gateway.server import GatewayServer

HI: list[Json] = [{"role": "user", "content": "hi"}]


class FullDisk:
    def write(self, _: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        pass


async def test_a_stream_with_odd_line_breaks_reads_back(codec: TurnCodec, tmp_path: Path):
    text = "a\u2028b\x85c"
    async with serving(codec, [{"text": text}]) as serve:
        recorder = Recorder(serve.server._server.config.app, tmp_path / "rec")
        server = GatewayServer(recorder, GatewayOptions())
        await server.start()
        url = server.base_url + "/v1/chat/completions"
        body: Json = {"messages": HI, "stream": True}
        await serve.http.post(url, json=body, headers={"x-api-key": "s", "Idempotency-Key": "k"})
        assert text in json.loads((tmp_path / "rec").read_text().split("\n")[0])["response"]
        ((request,),) = read_recording(tmp_path / "rec").sessions.values()
        assert request.answer is not None and request.answer.content == text
        assert request.headers["idempotency-key"] == "k" and request.headers["user-agent"].startswith("python-httpx")
        await server.close()
        recorder.close()


async def test_a_record_that_cannot_be_written_harms_no_session(
    codec: TurnCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async with serving(codec, [{"text": "one"}, {"text": "two"}]) as serve:
        recorder = Recorder(serve.server._server.config.app, tmp_path / "rec")
        recorder.close()
        full: Any = FullDisk()
        monkeypatch.setattr(recorder, "_file", full)
        server = GatewayServer(recorder, GatewayOptions())
        await server.start()
        for said in ("one", "two"):  # the first was told, so the second is no repetition of it
            answer = await serve.http.post(
                server.base_url + "/v1/chat/completions", json={"messages": HI}, headers={"x-api-key": "s"}
            )
            assert answer.json()["choices"][0]["message"]["content"] == said
        assert "No space left" in caplog.text
        await server.close()


async def test_only_its_owner_reads_a_recording(codec: TurnCodec, tmp_path: Path):
    async with serving(codec, [{"text": "ok"}]) as serve:
        Recorder(serve.app, tmp_path / "rec").close()
        assert (tmp_path / "rec").stat().st_mode & 0o777 == 0o600


async def test_a_body_over_the_limit_is_not_kept_in_memory(
    codec: TurnCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What comes behind the limit is dropped, and an exchange that broke off leaves no line."""
    monkeypatch.setattr("silva.gateway.recorder.MAX_RECORDED_BYTES", 8)
    chunks = [b"0123456789"] * 3
    delivery = Delivery()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in chunks:
            await receive()
        await send_json(send, 200, {})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": chunks[0], "more_body": True}

    async def send(_: Any) -> None:
        pass

    recorder = Recorder(app, tmp_path / "rec")
    scope: Json = {
        "type": "http",
        "method": "POST",
        "path": "/v1/messages",
        "headers": [],
        "state": {DELIVERY: delivery},
    }
    await recorder(scope, receive, send)
    delivery.lost = True
    await recorder(scope, receive, send)
    recorder.close()
    (line,) = (tmp_path / "rec").read_text().splitlines()
    assert json.loads(line)["body"] == "0123456789"
