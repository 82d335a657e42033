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
