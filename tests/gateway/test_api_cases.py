"""Field cases about the model API, through the real door."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway_serve import Json, serving
from pictures import data_uri, png
from raw_http import RawClient

from silva.codec import TurnCodec
from silva.forest.lineage import linear_leaf
from silva.gateway.http import MAX_BODY_BYTES

HI: list[Json] = [{"role": "user", "content": "hi"}]
BROKEN = '<tool_call>\n{"name": "f", "arguments": {"a": }</tool_call>'


async def test_api_01_broken_arguments_in_a_foreign_history_are_served(codec: TurnCodec):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"value": '}}
    history: list[Json] = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "not executed"},
        {"role": "user", "content": "Continue."},
    ]
    async with serving(codec, [{"text": "fine"}, {"text": "still fine"}]) as serve:
        message = await serve.message("s", history)
        await serve.message("s", [*history, message, {"role": "user", "content": "next"}])
        assert '{"value": ' in codec.decode(serve.calls("s")[0]["input_ids"])
        assert len(serve.responses("s")) == 2
        serve.sample("s")


async def test_api_01_broken_arguments_of_our_own_engine_go_on_from_the_sampled_ids(codec: TurnCodec):
    async with serving(codec, [{"text": BROKEN}, {"text": "ok"}]) as serve:
        message = await serve.message("s", HI)
        (call,) = message["tool_calls"]
        tail = {"role": "tool", "tool_call_id": call["id"], "content": "not executed"}
        await serve.message("s", [*HI, message, tail, {"role": "user", "content": "Continue."}])
        one, two = (call["input_ids"] for call in serve.calls("s"))
        sampled = list(serve.responses("s")[0].sampled)
        assert two[len(one) : len(one) + len(sampled)] == sampled
        serve.sample("s")


@pytest.mark.parametrize(
    ("line", "arguments", "content", "finish"),
    [
        ({"text": BROKEN}, '{"a": }', None, "tool_calls"),
        ({"text": '<tool_call>{"name":'}, None, '<tool_call>{"name":', "stop"),
        ({"text": '<tool_call>{"name":', "finish_reason": "length"}, None, '<tool_call>{"name":', "length"),
        ({"text": '<tool_call>{"name": "f", "arguments": {"a', "finish_reason": "length"}, '{"a', None, "length"),
    ],
)
async def test_api_03_malformed_calls_are_answered_committed_and_trained(
    codec: TurnCodec, line: Json, arguments: str | None, content: str | None, finish: str
):
    async with serving(codec, [line, {"text": "ok"}]) as serve:
        (choice,) = (await serve.chat("s", HI))["choices"]
        assert choice["finish_reason"] == finish
        assert choice["message"]["content"] == content
        calls = choice["message"].get("tool_calls", [])
        assert [call["function"]["arguments"] for call in calls] == ([] if arguments is None else [arguments])
        tails = [{"role": "tool", "tool_call_id": call["id"], "content": "no"} for call in calls]
        await serve.message("s", [*HI, choice["message"], *(tails or [{"role": "user", "content": "next"}])])
        sample = serve.sample("s")
        assert sum(sample.loss_mask) == sum(len(node.sampled) for node in serve.responses("s"))
        assert sample.num_turns == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_api_04_an_answer_cut_inside_its_thought_is_reasoning(thinking_codec: TurnCodec, stream: bool):
    script: list[Json] = [{"text": "let me see about it"}, {"text": "right</think>\n\nyes"}]
    async with serving(thinking_codec, script) as serve:
        limit = len(thinking_codec.encode_sampled("let me see"))
        answer = await serve.post("s", {"messages": HI, "max_tokens": limit, "stream": stream})
        if stream:
            data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            choice = json.loads(data[0])["choices"][0]
            message = choice["delta"]
        else:
            choice = answer.json()["choices"][0]
            message = choice["message"]
        assert message["reasoning_content"] == message["reasoning"] == "let me see"
        assert not message["content"]
        assert choice["finish_reason"] == "length"
        again = await serve.message("s", [*HI, message, {"role": "user", "content": "next"}])
        assert (again["reasoning_content"], again["content"]) == ("right", "yes")
        serve.sample("s")


def _filled(codec: TurnCodec, num_ids: int) -> list[Json]:
    """Messages whose prompt has exactly that many ids ("~" is one id whatever stands beside it)."""
    text = "~"
    while True:
        messages = [{"role": "user", "content": text}]
        ids = codec.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        if len(ids) == num_ids:
            return messages
        assert len(ids) < num_ids
        text += "~"


async def test_api_15_a_full_context_is_a_400_that_sdks_do_not_retry(codec: TurnCodec):
    async with serving(codec, [{"text": "a b c d e f g h"}], rollout_max_context_len=64) as serve:
        retrying = openai.AsyncOpenAI(base_url=serve.base_url, api_key="full", max_retries=3)
        with pytest.raises(openai.BadRequestError) as caught:
            await retrying.chat.completions.create(model="m", messages=_filled(codec, 64))  # type: ignore[arg-type]
        assert caught.value.code == "context_length_exceeded"
        assert len(serve.session("full").requests) == 1

        answer = await serve.chat("nearly", _filled(codec, 60), max_tokens=100)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 4

        history = list(HI)
        for _ in range(3):
            answer = await serve.post("grows", {"messages": history})
            if answer.status_code != 200:
                break
            history += [answer.json()["choices"][0]["message"], {"role": "user", "content": "and on?"}]
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert serve.responses("grows")
        serve.sample("grows")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, "x", True, 1.5, [], {}])
async def test_api_15_an_impossible_token_limit_is_a_400(codec: TurnCodec, name: str, value: object):
    async with serving(codec, [{"text": "ok"}]) as serve:
        answer = await serve.post("s", {"messages": HI, name: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name


async def test_api_15_limits_are_clamped_and_the_newer_name_wins(codec: TurnCodec):
    async with serving(codec, [{"text": "a b c d e"}], rollout_max_response_len=7) as serve:
        for fields, limit in [
            ({"max_tokens": 128000}, 7),
            ({"max_tokens": 5, "max_completion_tokens": 3}, 3),
            ({"max_tokens": 5, "max_completion_tokens": None}, 5),
            ({}, 7),
        ]:
            await serve.chat("s", HI, **fields)
            assert serve.calls("s")[-1]["sampling_params"]["max_new_tokens"] == limit


def _rss_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


@pytest.mark.slow
async def test_api_16_large_bodies_are_taken_and_let_go(codec: TurnCodec):
    async with serving(codec, [{"text": "ok"}]) as serve:
        picture = {"type": "image_url", "image_url": {"url": data_uri(png(6 << 20))}}
        body = {"messages": [{"role": "user", "content": [picture, {"type": "text", "text": "what is it?"}]}]}
        assert (await serve.post("s", body)).status_code == 200
        padded = json.dumps({"messages": HI, "padding": "x" * (20 << 20)}).encode()
        for _ in range(6):  # the allocator of a worker that ran other tests has to settle first
            assert (await serve.post("s", padded)).status_code == 200
        gc.collect()
        base_mb = _rss_mb()
        for _ in range(3):
            assert (await serve.post("s", padded)).status_code == 200
        assert _rss_mb() - base_mb < 30, "bodies of served requests are still held"


async def test_api_16_an_image_over_ten_turns_is_stored_once(codec: TurnCodec):
    pictures = [png(1 << 16, mark) for mark in range(20)]
    parts: list[Json] = [{"type": "text", "text": "which one?"}]
    parts += [{"type": "image_url", "image_url": {"url": data_uri(data)}} for data in pictures]
    digests = [hashlib.sha256(data).hexdigest() for data in pictures]
    async with serving(codec, [{"text": "ok"}]) as serve:
        messages: list[Json] = [{"role": "user", "content": parts}]
        for _ in range(10):
            messages += [await serve.message("s", messages), *HI]
        assert [call["images"] for call in serve.calls("s")] == [digests] * 10
        assert sorted(path.name for path in serve.media_dir.iterdir()) == sorted(digests)
        assert sum(path.stat().st_size for path in serve.media_dir.iterdir()) == 20 << 16
        assert serve.sample("s").num_turns == 10


async def test_api_16_chunked_bodies_have_the_same_limit(codec: TurnCodec):
    async def chunks(size: int) -> Any:
        yield b'{"messages":[{"role":"user","content":"hi"}],"padding":"'
        for _ in range(size >> 20):
            yield b"x" * (1 << 20)
        yield b'"}'

    async with serving(codec, [{"text": "ok"}]) as serve:
        url, headers = serve.base_url + "/chat/completions", {"authorization": "Bearer s"}
        small = await serve.http.post(url, content=chunks(8 << 20), headers=headers)
        assert small.status_code == 200
        large = await serve.http.post(url, content=chunks(MAX_BODY_BYTES + (2 << 20)), headers=headers)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
        announced = await serve.http.post(url, content=b"x" * (MAX_BODY_BYTES + 1), headers=headers)
        assert (announced.status_code, announced.json()["error"]["code"]) == (413, "body_too_large")
        assert (await serve.http.post(url, content=chunks(1 << 20), headers=headers)).status_code == 200


FAULTS: dict[str, Json] = {
    "status_500": {"error": "500"},
    "no_ids": {"ids": [], "append_eos": False},
    "html": {"error": "bad_json"},
    "short_logprobs": {"text": "hello", "logprobs": [-0.1]},
    "reset": {"error": "reset"},
    "hang": {"error": "hang"},
}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
async def test_api_20_a_faulty_engine_commits_nothing(codec: TurnCodec, fault: str, stream: bool):
    script = [{"text": "good"}, *[FAULTS[fault]] * 4]
    async with serving(codec, script, engine_timeout_s=0.01 if fault == "hang" else 300.0) as serve:
        message = await serve.message("s", HI)
        nodes = len(serve.forest("s").nodes)
        history = [*HI, message, {"role": "user", "content": "more"}]
        answer = await serve.post("s", {"messages": history, "stream": stream})
        if stream:
            assert answer.status_code == 200
            data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            assert data[1:] == ["[DONE]"]
            error = json.loads(data[0])["error"]
        else:
            assert answer.status_code == 503
            error = answer.json()["error"]
        assert error["code"] == "engine_error"
        assert len(serve.calls("s")) == 5
        assert len(serve.forest("s").nodes) == nodes
        serve.sample("s")
        assert (await serve.message("s", history))["content"] == "good"
        serve.sample("s")


async def test_api_20_a_fault_that_passes_is_not_seen_by_the_client(codec: TurnCodec):
    script = [{"text": "hello", "abort_after": 1}, {"error": "500"}, {"error": "reset"}, {"text": " world"}]
    async with serving(codec, script) as serve:
        assert (await serve.message("s", HI))["content"] == "hello world"
        partial = serve.calls("s")[-1]["input_ids"][len(serve.calls("s")[0]["input_ids"]) :]
        assert partial == list(serve.responses("s")[0].sampled)[:1]
        assert [a.error is None for a in serve.session("s").attempts] == [True, False, False, True]


async def test_api_20_a_lone_stop_id_is_an_empty_answer(codec: TurnCodec):
    async with serving(codec, [{"text": ""}, {"text": "ok"}]) as serve:
        answer = await serve.chat("s", HI)
        assert answer["choices"][0]["message"]["content"] == ""
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 1
        history = [*HI, answer["choices"][0]["message"], {"role": "user", "content": "well?"}]
        await serve.message("s", history)
        serve.sample("s")


@pytest.mark.parametrize("stream", [False, True])
async def test_tree_09_the_turn_is_committed_before_its_last_byte(codec: TurnCodec, stream: bool):
    """A client that reads to the terminal event and is gone at once, 200 times: no response is ever missing."""
    async with serving(codec, [{"text": "hello"}]) as serve:

        async def one(number: int) -> None:
            client = RawClient(serve.server.port, f"s{number}")
            await client.post({"messages": HI, "stream": stream})
            # The order is what counts: at the moment of the last byte the response stands already.
            assert len(serve.responses(f"s{number}")) == 1
            client.abort()
            session = await serve.registry.end(f"s{number}")
            assert session is not None and len(session.requests) == 1
            assert linear_leaf(session.forest).kind == "response"

        for first in range(0, 200, 20):
            await asyncio.gather(*(one(number) for number in range(first, first + 20)))


async def test_tree_09_an_sdk_client_sees_no_5xx_and_no_lost_turn(codec: TurnCodec):
    async with serving(codec, [{"text": "hello"}]) as serve:
        async with httpx.AsyncClient() as http:
            client = openai.AsyncOpenAI(base_url=serve.base_url, api_key="s", http_client=http, max_retries=0)
            history: list[Any] = list(HI)
            for _ in range(5):
                answer = await client.chat.completions.create(model="m", messages=history)
                history += [answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
        assert serve.sample("s").num_turns == 5
