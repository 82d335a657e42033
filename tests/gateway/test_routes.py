"""Routes, credentials and the small answers."""

from __future__ import annotations

import asyncio

import pytest
from gateway_serve import serving, until

from silva.codec import TurnCodec

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
OK = [{"text": "ok"}]


async def test_every_prefix_and_query_reaches_chat(codec: TurnCodec):
    async with serving(codec, OK) as serve:
        for path in ("", "/v1", "/v1/v1"):
            for joint, tail in (("/", ""), ("/", "/"), ("/", "?beta=true"), ("//", "")):
                answer = await serve.post("s", BODY, path=f"{path}{joint}chat/completions{tail}")
                assert answer.status_code == 200, (path, joint, tail)
        answer = await serve.post("s", BODY, path="/v2/chat/completions")
        assert answer.status_code == 404
        root = serve.base_url.removesuffix("/agentic_api")
        answer = await serve.http.post(root + "/v1/chat/completions", json=BODY)
        assert answer.status_code == 404
        assert "/agentic_api" in answer.json()["error"]["message"]


async def test_health_models_and_method_answers(codec: TurnCodec):
    async with serving(codec, OK) as serve:
        root = serve.base_url.removesuffix("/agentic_api")
        for base in (root, serve.base_url):
            assert (await serve.http.head(base + "/")).status_code == 200
            assert (await serve.http.head(base + "/api/hello")).status_code == 200
            assert (await serve.http.get(base + "/health")).json() == {"status": "ok"}
        for path in ("/models", "/v1/models"):
            listed = (await serve.http.get(serve.base_url + path)).json()
            assert [model["id"] for model in listed["data"]] == ["model"]
        assert (await serve.http.get(serve.base_url + "/v1/models/abc")).json()["id"] == "abc"
        answer = await serve.http.get(serve.base_url + "/chat/completions")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert serve.opened == {}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/messages"])
async def test_a_websocket_upgrade_is_refused_at_once(codec: TurnCodec, path: str):
    async with serving(codec, OK) as serve:
        headers = {
            "upgrade": "websocket",
            "connection": "upgrade",
            "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
            "sec-websocket-version": "13",
        }
        answer = await serve.http.get(serve.base_url + path, headers=headers)
        assert (answer.status_code, answer.headers["upgrade"]) == (426, "HTTP/1.1")


@pytest.mark.parametrize(
    ("path", "keys"),
    [
        ("/v1/chat/completions", {"error"}),
        ("/v1/responses", {"error"}),
        ("/v1/messages", {"type", "error"}),
        ("/v1/messages/count_tokens", {"type", "error"}),
    ],
)
async def test_each_protocol_refuses_in_its_own_shape(codec: TurnCodec, path: str, keys: set[str]):
    async with serving(codec, OK) as serve:
        answer = await serve.http.post(serve.base_url + path, json={})
        assert answer.status_code == 401
        assert keys <= set(answer.json())
        assert answer.json()["error"]["type"] == "authentication_error"
        empty = await serve.post("s", {"model": "m"}, path=path)
        assert (empty.status_code, empty.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/responses/resp_1/cancel", "/v1/embeddings"])
async def test_an_unknown_route_is_a_404_in_the_form_of_its_protocol(codec: TurnCodec, path: str):
    async with serving(codec, OK) as serve:
        answer = await serve.post("s", BODY, path=path)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (404, "false")
        body = answer.json()
        assert (body.get("type") == "error") == ("messages" in path)
        assert body["error"]["type"] == "not_found_error" and path in body["error"]["message"]


async def test_credentials_are_checked_before_the_body(codec: TurnCodec):
    async with serving(codec, OK, open_sessions=False) as serve:
        url = serve.base_url + "/chat/completions"
        serve.registry.open("known", "g", "train").open_gate()
        for headers in (
            {},
            {"authorization": "Bearer other"},
            {"authorization": "Bearer"},
            {"authorization": "Basic known"},
            {"x-api-key": "other"},
            {"authorization": "Bearer other", "x-api-key": "known"},
        ):
            answer = await serve.http.post(url, content=b"no json", headers=headers)
            assert answer.status_code == 401, headers
            assert answer.json()["error"]["type"] == "authentication_error"
        for headers in (
            {"authorization": "bearer known"},
            {"x-api-key": "known"},
            {"authorization": "Basic xyz", "x-api-key": "known"},
            {"authorization": "Bearer known", "x-api-key": "other"},
        ):
            assert (await serve.http.post(url, json=BODY, headers=headers)).status_code == 200, headers


async def test_an_ended_session_is_a_404_that_is_not_retried(codec: TurnCodec):
    async with serving(codec, OK, open_sessions=False) as serve:
        serve.registry.open("s", "g", "train").open_gate()
        assert (await serve.post("s", BODY)).status_code == 200
        assert await serve.registry.end("s") is not None
        assert await serve.registry.end("s") is None
        answer = await serve.post("s", BODY)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (404, "false")
        answer = await serve.http.post(serve.base_url + "/sessions/s/finish")
        assert answer.status_code == 404


@pytest.mark.slow
@pytest.mark.parametrize("key", ["a/b", "../x", ".hidden", "x" * 200, "a b", "é"])
async def test_strange_keys_open_no_session(codec: TurnCodec, key: str):
    async with serving(codec, OK) as serve:
        headers = [(b"authorization", b"Bearer " + key.encode("utf-8"))]
        answer = await serve.http.post(serve.base_url + "/chat/completions", json=BODY, headers=headers)
        assert answer.status_code == 401
        assert serve.registry.live_ids == []


async def test_finish_hands_the_document_on_and_ends_the_session(codec: TurnCodec):
    async with serving(codec, OK) as serve:
        await serve.post("s", BODY)
        headers = {"authorization": "Bearer s"}
        wrong = await serve.http.post(serve.base_url + "/sessions/s/finish", headers={"authorization": "Bearer other"})
        assert wrong.status_code == 401
        get = await serve.http.get(serve.base_url + "/sessions/s/finish")
        assert get.status_code == 405
        answer = await serve.http.post(
            serve.base_url + "/sessions/s/finish", content=b'{"reward": 1.0}', headers=headers
        )
        assert answer.json() == {"status": "exported", "reason": None, "num_samples": 1}
        assert serve.finished == {"s": b'{"reward": 1.0}'}
        assert (await serve.post("s", BODY)).status_code == 404
        again = await serve.http.post(serve.base_url + "/sessions/s/finish", headers=headers)
        assert again.status_code == 404


async def test_a_session_that_ends_answers_its_open_requests(codec: TurnCodec):
    async with serving(codec, [{"error": "hang"}]) as serve:
        waiting = [asyncio.create_task(serve.post("s", {**BODY, "stream": stream})) for stream in (False, True)]
        await until(lambda: len(serve.calls("s")) == 2)
        session = serve.session("s")
        await serve.registry.end("s")
        assert not session.open_turns
        assert [record.error_code for record in session.requests] == ["session_ended"] * 2
        plain, stream = await asyncio.gather(*waiting)
        assert (plain.status_code, plain.headers["x-should-retry"]) == (404, "false")
        assert stream.status_code == 200
        assert "session_ended" in stream.text and stream.text.endswith("data: [DONE]\n\n")
        assert session.forest.nodes == []
        assert serve.engine.usage().num_running == 0


async def test_each_request_is_recorded(codec: TurnCodec):
    async with serving(codec, OK) as serve:
        fields = {"temperature": "hot", "top_p": [], "user": "u", "frobnicate": 1, "tools": [{"type": "web_search"}]}
        answer = await serve.post("s", {**BODY, **fields, "stream": True})
        assert answer.status_code == 200
        await serve.post("s", {"messages": []})
        good, bad = serve.session("s").requests
        assert good.ignored_fields == ["frobnicate", "temperature", "top_p", "user", "tools[0]:web_search"]
        assert (good.http_status, good.match, good.stream, good.finish_reason) == (200, "root", True, "stop")
        assert good.usage is not None and good.latency_s is not None and good.node_id == 2
        assert (bad.http_status, bad.error_code, bad.node_id) == (400, "empty_messages", None)
        assert good.request_id != bad.request_id and len(good.request_id) == len(bad.request_id)


async def test_a_refusal_says_what_to_send_instead(codec: TurnCodec):
    async def message(path: str, headers: dict[str, str], **fields: object) -> str:
        answer = await serve.http.post(serve.base_url + path, json={**BODY, **fields}, headers=headers)
        assert answer.status_code in (400, 401, 404)
        return answer.json()["error"]["message"]

    async with serving(codec, OK, open_sessions=False) as serve:
        serve.registry.open("s", "g", "train").open_gate()
        key = {"x-api-key": "s"}
        assert "carries no key; send the session id (RELAX_SESSION_ID)" in await message("/chat/completions", {})
        wrong = await message("/chat/completions", {"x-api-key": "other"})
        assert "not that of a session" in wrong and "other" not in wrong
        assert "POST /agentic_api/v1/chat/completions" in await message("/chat/complete", key)
        for name, value, rule in (
            ("max_tokens", 0, "is 0; it must be a whole number"),
            ("seed", "x" * 999, "...; it must be a whole number"),
            ("n", 2, "is 2; it must be 1"),
            ("stream", [], "is []; it must be true or false"),
            ("stop", {}, "is {}; it must be a string or a list"),
        ):
            assert rule in await message("/chat/completions", key, **{name: value})
