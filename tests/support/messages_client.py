"""Ways to speak the Messages protocol to a gateway of `gateway_serve`."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
from gateway_serve import Json, Serve

CUT = {"finish_reason": "length"}


def sdk(serve: Serve, session_id: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=serve.base_url, auth_token=session_id, api_key=None, max_retries=0)


async def post(
    serve: Serve, session_id: str, messages: Any, *, path: str = "/v1/messages", **fields: Any
) -> httpx.Response:
    return await serve.post(session_id, {"model": "m", "max_tokens": 128000, "messages": messages, **fields}, path=path)


async def ask(serve: Serve, session_id: str, messages: Any, **fields: Any) -> Json:
    """One turn that must work; the answer's JSON."""
    answer = await post(serve, session_id, messages, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(serve: Serve, session_id: str, messages: Any, **fields: Any) -> str:
    """A request that must be a 400 in the protocol's own shape; its message."""
    answer = await post(serve, session_id, messages, **fields)
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    return body["error"]["message"]


def events(text: str) -> list[Json]:
    """The data of each event of a stream; every event's name is checked to be the type of its data."""
    found: list[Json] = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + found[-1]["type"]
    return found


def assembled(found: list[Json]) -> Json:
    """The answer that the events of a stream add up to, as JSON would have told it."""
    (start,) = [event["message"] for event in found if event["type"] == "message_start"]
    (end,) = [event for event in found if event["type"] == "message_delta"]
    blocks: list[Json] = []
    texts: list[str] = []
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            texts.append("")
        elif event["type"] == "content_block_delta":
            for key, value in event["delta"].items():
                if key == "partial_json":
                    blocks[-1]["input"] = json.loads(value)
                elif key != "type":
                    blocks[-1][key] += value
    return {**start, **end["delta"], "usage": end["usage"], "content": blocks}
