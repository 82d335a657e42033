"""What must not make a difference between the protocols: how tools are written, empty answers, the names of ids."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from gateway_serve import Json, serving
from messages_client import sdk
from speakers import SPEAKERS, Ask, Plan, Speaker

from silva.codec import TurnCodec
from silva.types.errors import SessionFailure

SCHEMA: Json = {"type": "object", "properties": {"q": {"type": "string", "$schema": "kept"}}, "required": ["q"]}
WITH_DIALECT: Json = {"$schema": "http://json-schema.org/draft-07/schema#", **SCHEMA}
CHAT_TOOLS: list[Json] = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}},
    {"function": {"parameters": WITH_DIALECT, "name": "f", "strict": True, "description": "d"}, "strict": None},
    {
        "cache_control": {"type": "ephemeral"},
        "type": "function",
        "function": {"description": "d", "name": "f", "parameters": SCHEMA, "strict": False},
    },
    {"type": "function", "name": "f", "description": "d", "parameters": WITH_DIALECT, "defer_loading": True},
]
RESPONSES_TOOLS: list[Json] = [
    {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True},
    {"parameters": WITH_DIALECT, "type": "function", "description": "d", "name": "f", "defer_loading": True},
]
MESSAGES_TOOLS: list[Json] = [
    {"name": "f", "description": "d", "input_schema": SCHEMA},
    {
        "type": "custom",
        "input_schema": WITH_DIALECT,
        "description": "d",
        "name": "f",
        "cache_control": {"type": "ephemeral"},
        "eager_input_streaming": True,
        "strict": True,
    },
]


async def test_tools_that_count_as_the_same_are_read_as_the_same(codec: TurnCodec):
    bodies: list[tuple[str, Json]] = [
        *(("/v1/chat/completions", {"tools": [tool]}) for tool in CHAT_TOOLS),
        *(("/v1/responses", {"tools": [tool]}) for tool in RESPONSES_TOOLS),
        *(("/v1/messages", {"tools": [tool], "max_tokens": 9}) for tool in MESSAGES_TOOLS),
    ]
    async with serving(codec, [{"text": "ok"}]) as serve:
        for number, (path, body) in enumerate(bodies):
            name = "input" if "responses" in path else "messages"
            said = {name: [{"role": "user", "content": "hi"}]}
            assert (await serve.post(f"s{number}", body | said, path)).status_code == 200
        given = {tuple(call["input_ids"]) for call in serve.calls()}
        roots = {serve.forest(f"s{number}").nodes[0].key for number in range(len(bodies))}
        assert len(given) == len(roots) == 1
        read = codec.decode(list(given.pop()))
        assert '"$schema": "kept"' in read
        assert not any(word in read for word in ("strict", "cache_control", "defer_loading", "draft-07", "eager"))


async def test_the_model_goes_on_reading_the_tools_as_it_read_them_first(codec: TurnCodec):
    turned = {key: SCHEMA[key] for key in reversed(SCHEMA)}
    async with serving(codec, [{"text": "ok"}]) as serve:
        for text, schema in (("one", SCHEMA), ("two", turned)):
            tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
            await serve.message("s", [{"role": "user", "content": text}], tools=[tool])
        first, second = (codec.decode(call["input_ids"]) for call in serve.calls())
        assert len([node for node in serve.forest("s").nodes if node.kind == "root"]) == 1
        assert second == first.replace("one", "two")


EMPTY = (Ask(parts=("hi",)), Ask(parts=("go on",)), Ask(parts=("and on",)), Ask(parts=("last",)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPEAKERS)
@pytest.mark.parametrize("mode", ["lenient", "exact"])
@pytest.mark.parametrize("thought", ["", "<think>\nhm\n</think>\n\n"])
async def test_a_client_that_keeps_nothing_of_an_empty_answer_goes_on(
    codec: TurnCodec, kind: type[Speaker], mode: str, thought: str
):
    """All do so in Responses, where an empty answer has no items; many do in the others."""
    script = [{"text": thought}, {"text": "a"}, {"text": thought}, {"text": "b"}]
    async with serving(codec, script, agentic_echo_match=mode) as serve:
        speaker = kind(serve, "s", Plan(asks=EMPTY), stream=False, real=False)
        for number, ask in enumerate(EMPTY):
            kept = len(speaker.history)
            told = await speaker.turn(ask)
            assert told.content == ("" if number in (0, 2) else "ab"[number // 2])
            if not told.content:
                del speaker.history[kept + 1 :]
        records = serve.session("s").requests
        if mode == "exact":
            assert [record.match for record in records] == ["root", "branch", "append", "branch"]
            assert not any(record.repairs for record in records)
            assert records[1].difference is not None
            with pytest.raises(SessionFailure, match="not linear"):
                serve.sample("s")
            return
        kinds = ["answer_missing", "reasoning_missing"] if thought else ["answer_missing"]
        assert [record.match for record in records] == ["root", "append", "append", "append"]
        assert [record.repairs for record in records] == [[], kinds, [], kinds]
        assert all(record.difference is None for record in records)
        assert serve.turns.counters["repair_answer_missing"] == 2
        sample = serve.sample("s")
        trained = codec.decode([t for t, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on])
        assert trained == "".join(line["text"] + "<|im_end|>" for line in script)


async def test_messages_clients_read_the_request_id_under_their_name(codec: TurnCodec):
    async with serving(codec, [{"text": "ok"}]) as serve:
        hi: Any = [{"role": "user", "content": "hi"}]
        async with sdk(serve, "s") as client:
            reply = await client.messages.create(model="m", max_tokens=9, messages=hi)
            with pytest.raises(anthropic.BadRequestError) as early:
                await client.messages.create(model="m", max_tokens=9, messages=[])
            with pytest.raises(anthropic.BadRequestError) as placed:
                huge: Any = [{"role": "user", "content": "x" * 4_000_000}]
                await client.messages.create(model="m", max_tokens=9, messages=huge)
        records = serve.session("s").requests
        assert reply._request_id == records[0].request_id and reply.id == f"msg_{records[0].request_id}"
        for caught, record in ((early, records[1]), (placed, records[2])):
            assert caught.value.request_id == record.request_id
            assert caught.value.response.headers["x-request-id"] == record.request_id
            assert caught.value.response.json()["request_id"] == record.request_id
        with pytest.raises(openai.BadRequestError) as other:
            await serve.sdk("s").chat.completions.create(model="m", messages=[])
        assert other.value.request_id == serve.session("s").requests[3].request_id
        assert "request-id" not in other.value.response.headers


@pytest.mark.parametrize("kind", SPEAKERS)
async def test_an_empty_answer_behind_an_answer_is_a_turn_of_its_own(codec: TurnCodec, kind: type[Speaker]):
    """Told as text or not, the call before it keeps its place when nothing was added to it."""
    broken = '<tool_call>\n{"name": "f", "arguments": {"a": }\n</tool_call>'
    script: list[Json] = [{"text": broken}, {"text": ""}, {"text": "a"}, {"text": "b"}]
    asks = (Ask(parts=("hi",)), Ask(results=()), Ask(parts=("well?",)), Ask(parts=("go",)))
    async with serving(codec, script, agentic_echo_match="lenient") as serve:
        speaker = kind(serve, "s", Plan(asks=asks), stream=False, real=False)
        for ask in asks:
            await speaker.turn(ask)
        assert [record.match for record in serve.session("s").requests] == ["root", "append", "append", "append"]
        sample = serve.sample("s")
        trained = codec.decode([t for t, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on])
        assert trained == "".join(line["text"] + "<|im_end|>" for line in script)
