"""Field cases about the Responses protocol, through the real door."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_serve import Json, serving

from silva.codec import TurnCodec
from silva.types.messages import ToolCall

USER: Json = {"role": "user", "content": "hi"}
NEXT: Json = {"role": "user", "content": "next"}
TWO_CALLS = (
    "<think>\nR\n</think>\n\nlet me"
    '\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    '\n<tool_call>\n{"name": "g", "arguments": {"b": 2}}\n</tool_call>'
)


@pytest.mark.parametrize("nulls", [False, True])
async def test_api_11_items_of_one_turn_come_back_as_one_message(codec: TurnCodec, nulls: bool):
    async with serving(codec, [{"text": TWO_CALLS}, {"text": "done"}]) as serve:
        client: Any = serve.sdk("s")
        first = await client.responses.create(model="m", input=[USER])
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        echo = [item.model_dump(exclude_none=not nulls) for item in first.output]
        outputs = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
            for item in echo
            if item["type"] == "function_call"
        ]
        await client.responses.create(model="m", input=[USER, *echo, *outputs, NEXT])
        one, two = serve.session("s").requests
        assert (one.match, two.match) == ("root", "append")
        observation = [node for node in serve.forest("s").nodes if node.kind == "observation"][-1]
        assert [message.role for message in observation.messages] == ["tool", "tool", "user"]
        before, after = (call["input_ids"] for call in serve.calls("s"))
        sampled = list(serve.responses("s")[0].sampled)
        assert after[len(before) : len(before) + len(sampled)] == sampled
        assert serve.sample("s").num_turns == 2


async def test_api_11_a_foreign_turn_in_items_is_one_message_too(codec: TurnCodec):
    calls = [
        {"type": "function_call", "call_id": name, "name": "f", "arguments": '{"a": 1}', "id": f"fc_{name}"}
        for name in ("c1", "c2")
    ]
    items = [
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "R"}]},
        {"type": "message", "role": "assistant", "content": "let me"},
        *calls,
        *({"type": "function_call_output", "call_id": call["call_id"], "output": "ok"} for call in calls),
        NEXT,
    ]
    async with serving(codec, [{"text": "ok"}]) as serve:
        answer = await serve.post("s", {"input": items}, "/v1/responses")
        assert answer.status_code == 200
        (observation,) = [node for node in serve.forest("s").nodes if node.kind == "observation"]
        said = observation.messages[1]
        assert (said.reasoning, said.content) == ("R", "let me")
        assert said.tool_calls == tuple(ToolCall(id=name, name="f", arguments='{"a": 1}') for name in ("c1", "c2"))
        roles = [message.role for message in observation.messages]
        assert roles == ["user", "assistant", "tool", "tool", "user"]


async def test_api_01_broken_arguments_in_items_are_served(codec: TurnCodec):
    items = [
        USER,
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"value": '},
        {"type": "function_call_output", "call_id": "c1", "output": "not executed"},
        {"role": "user", "content": "Continue."},
    ]
    async with serving(codec, [{"text": "fine"}, {"text": "still fine"}]) as serve:
        first = (await serve.post("s", {"input": items}, "/v1/responses")).json()
        answer = await serve.post("s", {"input": [*items, *first["output"], NEXT]}, "/v1/responses")
        assert answer.headers["x-silva-match"] == "append"
        assert '{"value": ' in codec.decode(serve.calls("s")[0]["input_ids"])
        serve.sample("s")


async def test_api_04_an_answer_cut_inside_its_thought_is_an_incomplete_reasoning_item(thinking_codec: TurnCodec):
    script: list[Json] = [{"text": "let me see about it"}, {"text": "right</think>\n\nyes"}]
    async with serving(thinking_codec, script) as serve:
        limit = len(thinking_codec.encode_sampled("let me see"))
        reply = (await serve.post("s", {"input": [USER], "max_output_tokens": limit}, "/v1/responses")).json()
        assert (reply["status"], [item["type"] for item in reply["output"]]) == ("incomplete", ["reasoning"])
        assert reply["output"][0]["summary"] == [{"type": "summary_text", "text": "let me see"}]
        again = await serve.post("s", {"input": [USER, *reply["output"], NEXT]}, "/v1/responses")
        assert again.headers["x-silva-match"] == "append"
        assert [item["type"] for item in again.json()["output"]] == ["reasoning", "message"]
        serve.sample("s")
