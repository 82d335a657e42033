"""The Messages protocol over the wire, with the real SDK and with plain HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest
from gateway_serve import Json, serving, until
from manual_clock import ManualClock
from messages_client import CUT, ask, assembled, events, post, refused, sdk
from raw_http import RawClient

from silva.codec import TurnCodec

HI: list[Json] = [{"role": "user", "content": "hi"}]
MORE: Json = {"role": "user", "content": "more"}
TURN = (
    "<think>\nplan\n</think>\n\nLook."
    '\n<tool_call>\n{"name": "look", "arguments": {"place": "Paris", "n": 1.0}}\n</tool_call>'
    '\n<tool_call>\n{"name": "look", "arguments": {"place": "Rome", "deep": {"a": [1, null]}}}\n</tool_call>'
)
TOOLS: list[Json] = [
    {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}},
]
CHAT_TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
    }
]
BROKEN = '<tool_call>\n{"name": "f", "arguments": {"a": }</tool_call>'
GOOD = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def text(value: str, **more: Any) -> Json:
    return {"type": "text", "text": value, **more}


def result(call_id: str, content: Any, **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


async def test_an_answer_has_all_fields_and_the_sdk_reads_it(codec: TurnCodec):
    async with serving(codec, [{"text": TURN}]) as serve, sdk(serve, "s") as client:
        message = await client.messages.create(
            model="claude-x", max_tokens=9000, messages=[{"role": "user", "content": "hi"}]
        )
        assert (message.type, message.role, message.model) == ("message", "assistant", "claude-x")
        assert message.id.startswith("msg_")
        thinking, said, one, two = message.content
        assert thinking.type == "thinking" and thinking.thinking == "plan" and thinking.signature
        assert said.type == "text" and said.text == "Look."
        assert one.type == "tool_use" and (one.name, one.input) == ("look", {"place": "Paris", "n": 1.0})
        assert two.type == "tool_use" and two.input == {"place": "Rome", "deep": {"a": [1, None]}}
        assert one.id != two.id
        assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
        (call,), (node,) = serve.calls("s"), serve.responses("s")
        assert message.usage.input_tokens == len(call["input_ids"])
        assert message.usage.output_tokens == len(node.sampled)
        assert (message.usage.cache_creation_input_tokens, message.usage.cache_read_input_tokens) == (0, 0)


async def test_the_sdk_assembles_the_stream(codec: TurnCodec):
    async with (
        serving(codec, [{"text": TURN}]) as serve,
        sdk(serve, "s") as client,
        client.messages.stream(model="m", max_tokens=4000, messages=[{"role": "user", "content": "hi"}]) as stream,
    ):
        final = await stream.get_final_message()
        whole = await ask(serve, "other", HI)
        assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert [block.model_dump(exclude_none=True) for block in final.content] == whole["content"]
        assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole["usage"]["output_tokens"])
        assert final.usage.input_tokens == whole["usage"]["input_tokens"]


@pytest.mark.parametrize("line", [{"text": TURN}, {"text": "just text"}, {"text": ""}, {"text": "a b c", **CUT}])
async def test_stream_and_json_tell_the_same(codec: TurnCodec, line: Json):
    async with serving(codec, [line]) as serve:
        whole = await ask(serve, "plain", HI)
        answer = await post(serve, "stream", HI, stream=True)
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = events(answer.text)
        kinds = [event["type"] for event in found]
        assert kinds[:2] == ["ping", "message_start"] and kinds[-2:] == ["message_delta", "message_stop"]
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole["content"])
        told = assembled(found)
        assert {**told, "id": whole["id"]} == whole
        one, two = serve.responses("plain")[0], serve.responses("stream")[0]
        assert (one.ids, one.finish, one.key) == (two.ids, two.finish, two.key)


async def test_a_stream_pings_while_it_waits(codec: TurnCodec):
    clock = ManualClock()
    async with serving(codec, [{"text": "ok", "delay_s": 40.0}], clock=clock) as serve:
        client = RawClient(serve.server.port, "s")
        await client.send({"messages": HI, "max_tokens": 9, "stream": True}, path="/messages")
        assert (await client.head())[0] == 200
        ping = b'event: ping\ndata: {"type":"ping"}\n\n'
        assert await client.chunk() == ping
        for _ in range(2):
            coming = asyncio.create_task(client.chunk())
            await clock.advance(15)
            assert await coming == ping
        coming = asyncio.create_task(client.chunk())
        await clock.advance(11)
        assert (await coming).startswith(b"event: message_start\n")
        client.abort()


async def test_three_turns_with_parallel_calls_are_one_line_as_in_chat(codec: TurnCodec):
    """The engine gets the same ids, and the sample has the same mask, whichever protocol the client speaks."""
    script: list[Json] = [{"text": TURN}, {"text": "<think>\nsee\n</think>\n\n" + GOOD}, {"text": "done"}]
    async with serving(codec, script) as serve, sdk(serve, "anthropic") as client:
        history: list[Any] = [{"role": "user", "content": [text("hi", cache_control={"type": "ephemeral"})]}]
        usages: list[Any] = []
        for number in range(3):
            answer = await client.messages.with_raw_response.create(
                model="m",
                max_tokens=1000,
                system=[{"type": "text", "text": "be brief"}],
                messages=history,
                tools=TOOLS,  # type: ignore[arg-type]
            )
            message = await answer.parse()
            assert answer.headers["x-silva-match"] == ("append" if number else "root")
            usages.append((message.usage.input_tokens, message.usage.output_tokens))
            history.append({"role": "assistant", "content": message.content})
            results = [
                result(block.id, f"r{at}") for at, block in enumerate(message.content) if block.type == "tool_use"
            ]
            history.append({"role": "user", "content": [*results, text("go on")]})

        chat: list[Json] = [{"role": "system", "content": "be brief"}, *HI]
        for number in range(3):
            answer = await serve.chat("chat", chat, tools=CHAT_TOOLS)
            usage, told = answer["usage"], answer["choices"][0]["message"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == usages[number]
            places = [*(["text"] if told["content"] else []), *(["think"] if told.get("reasoning") else [])]
            chat.append(told)
            for at, call in enumerate(told.get("tool_calls", []), start=len(places)):
                chat.append({"role": "tool", "tool_call_id": call["id"], "content": f"r{at}"})
            chat.append({"role": "user", "content": "go on"})

        theirs, ours = serve.calls("chat"), serve.calls("anthropic")
        assert [call["input_ids"] for call in ours] == [call["input_ids"] for call in theirs]
        one, two = serve.sample("anthropic"), serve.sample("chat")
        assert (one.token_ids, one.loss_mask) == (two.token_ids, two.loss_mask)
        assert one.num_turns == 3
        assert [node.key for node in serve.responses("anthropic")] == [node.key for node in serve.responses("chat")]


async def test_blocks_become_messages_in_their_order(codec: TurnCodec):
    history: list[Json] = [
        *HI,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}, text("x")]},
        {"role": "user", "content": [result("a", "one"), text("t1"), text("t2"), text("")]},
        {"role": "system", "content": [text("late "), text("word")]},
        {"role": "user", "content": [text("before"), text("")]},
    ]
    chat: list[Json] = [
        {"role": "system", "content": "ab"},
        *HI,
        {
            "role": "assistant",
            "content": "x",
            "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "user", "content": "t1t2"},
        {"role": "system", "content": "late word"},
        {"role": "user", "content": "before"},
    ]
    async with serving(codec, [{"text": "ok"}]) as serve:
        await ask(serve, "s", history, system=[text("a"), text("b", cache_control={"type": "ephemeral"})])
        await serve.chat("chat", chat)
        assert serve.calls("s")[0]["input_ids"] == serve.calls("chat")[0]["input_ids"]
        assert serve.forest("s").nodes[1].messages == serve.forest("chat").nodes[1].messages


async def test_cache_marks_and_spelling_are_no_part_of_a_history(codec: TurnCodec):
    async with serving(codec, [{"text": TURN}, {"text": "ok"}]) as serve:
        first = await ask(serve, "s", HI, system="be brief", tools=TOOLS)
        marked = {"cache_control": {"type": "ephemeral"}}
        blocks = [{**block, **marked} for block in first["content"]]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = dict(reversed(block["input"].items()))
        calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
        history = [
            {"role": "user", "content": [text("h", **marked), text("i")]},
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [result(call, [text("r", **marked)], **marked) for call in calls]},
        ]
        tools = [{**TOOLS[0], **marked, "type": "custom"}, {"type": "web_search_20250305", "name": "web_search"}]
        answer = await post(serve, "s", history, system=[text("be brief", **marked)], tools=tools)
        assert (answer.status_code, answer.headers["x-silva-match"]) == (200, "append")
        assert serve.session("s").requests[1].ignored_fields == ["tools[1]:web_search_20250305"]
        serve.sample("s")


async def test_an_empty_answer_is_an_empty_list_that_comes_back(codec: TurnCodec):
    async with serving(codec, [{"text": ""}, {"text": "ok"}]) as serve:
        first = await ask(serve, "s", HI)
        assert (first["content"], first["stop_reason"], first["usage"]["output_tokens"]) == ([], "end_turn", 1)
        answer = await post(serve, "s", [*HI, {"role": "assistant", "content": first["content"]}, MORE])
        assert answer.headers["x-silva-match"] == "append"


@pytest.mark.parametrize("sampled", [BROKEN, "Well.\n" + BROKEN, BROKEN + "\n" + GOOD, GOOD + "\n" + BROKEN + "\ntail"])
async def test_a_call_without_an_object_is_told_as_the_text_that_was_sampled(codec: TurnCodec, sampled: str):
    async with serving(codec, [{"text": sampled}, {"text": "ok"}]) as serve:
        first = await ask(serve, "s", HI)
        whole = "".join(block.get("text", "") for block in first["content"])
        assert BROKEN in whole
        calls = [block for block in first["content"] if block["type"] == "tool_use"]
        assert [call["input"] for call in calls] == ([{"a": 1}] if GOOD in sampled else [])
        assert first["stop_reason"] == ("tool_use" if calls else "end_turn")
        (node,) = serve.responses("s")
        assert {call["id"] for call in calls} <= {call.id for call in node.messages[0].tool_calls}
        tail = [result(call["id"], "r") for call in calls] or [text("again")]
        history = [*HI, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": tail}]
        answer = await post(serve, "s", history)
        assert answer.headers["x-silva-match"] == "append"
        one, two = (call["input_ids"] for call in serve.calls("s"))
        assert two[: len(one) + len(node.sampled)] == [*one, *node.sampled]
        serve.sample("s")


async def test_the_same_broken_call_twice_is_two_turns_of_one_line(codec: TurnCodec):
    async with serving(codec, [{"text": BROKEN}, {"text": BROKEN}, {"text": "ok"}]) as serve:
        history = list(HI)
        for number in range(3):
            answer = await post(serve, "s", history)
            assert answer.headers["x-silva-match"] == ("append" if number else "root")
            history += [{"role": "assistant", "content": answer.json()["content"]}, MORE]
        assert serve.sample("s").num_turns == 3


async def test_a_cut_call_is_text_and_its_end_is_the_call(codec: TurnCodec):
    script: list[Json] = [
        {"text": '<tool_call>\n{"name": "f", "arguments": {"a', **CUT},
        {"text": '": 1}}\n</tool_call>'},
        {"text": "ok"},
    ]
    async with serving(codec, script) as serve:
        first = await ask(serve, "s", HI)
        assert first["stop_reason"] == "max_tokens"
        assert first["content"] == [text('<tool_call>\n{"name": "f", "arguments": {"a')]
        history = [*HI, {"role": "assistant", "content": first["content"]}]
        second = await ask(serve, "s", history)
        (call,) = second["content"]
        assert (call["type"], call["input"], second["stop_reason"]) == ("tool_use", {"a": 1}, "tool_use")
        history += [
            {"role": "assistant", "content": second["content"]},
            {"role": "user", "content": [result(call["id"], "r")]},
        ]
        answer = await post(serve, "s", history)
        assert answer.headers["x-silva-match"] == "append"
        serve.sample("s")


@pytest.mark.parametrize("end", ['": 1}}\n</tool_call>', '": }\n</tool_call>', '": }\n</tool_call>\n' + GOOD])
async def test_a_cut_call_and_its_end_may_come_back_as_one_message(codec: TurnCodec, end: str):
    script: list[Json] = [{"text": '<tool_call>\n{"name": "f", "arguments": {"a', **CUT}, {"text": end}, {"text": "ok"}]
    async with serving(codec, script) as serve:
        first = await ask(serve, "s", HI)
        history = [*HI, {"role": "assistant", "content": first["content"]}]
        second = await ask(serve, "s", history)
        calls = [block["id"] for block in second["content"] if block["type"] == "tool_use"]
        history[-1]["content"] = [*first["content"], *second["content"]]
        history.append({"role": "user", "content": [*(result(call, "r") for call in calls), text("and?")]})
        answer = await post(serve, "s", history)
        assert (answer.headers["x-silva-match"], answer.headers["x-silva-repairs"]) == ("append", "0")
        assert serve.sample("s").num_turns == 3


async def test_stop_strings_of_the_run_are_no_stop_sequences(codec: TurnCodec):
    async with serving(codec, [{"text": "A STOP B"}], rollout_stop=["STOP"]) as serve:
        plain = await ask(serve, "s", HI)
        named = await ask(serve, "n", HI, stop_sequences=["never", "STOP"])
        assert plain["content"] == named["content"] == [text("A ")]
        assert (plain["stop_reason"], plain["stop_sequence"]) == ("end_turn", None)
        assert (named["stop_reason"], named["stop_sequence"]) == ("stop_sequence", "STOP")


async def test_tokens_are_counted_without_a_turn(codec: TurnCodec):
    async with serving(codec, [{"text": TURN}, {"text": "ok"}]) as serve, sdk(serve, "s") as client:
        counted = await client.messages.count_tokens(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            system="be brief",
            tools=TOOLS,  # type: ignore[arg-type]
        )
        assert serve.calls() == [] and serve.forest("s").nodes == [] and serve.session("s").requests == []
        first = await ask(serve, "s", HI, system="be brief", tools=TOOLS)
        assert counted.input_tokens == first["usage"]["input_tokens"]
        calls = [block["id"] for block in first["content"] if block["type"] == "tool_use"]
        history = [
            *HI,
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result(call, "r") for call in calls]},
        ]
        for prefix in ("", "/v1", "/v1/v1"):
            answer = await serve.post(
                "s",
                {"messages": history, "system": "be brief", "tools": TOOLS},
                path=f"{prefix}/messages/count_tokens?beta=true",
            )
            assert answer.status_code == 200, answer.text
        second = await ask(serve, "s", history, system="be brief", tools=TOOLS)
        assert answer.json() == {"input_tokens": second["usage"]["input_tokens"]}
        path = "/v1/messages/count_tokens"
        assert (await serve.post("s", {"messages": []}, path=path)).json()["type"] == "error"
        assert (await serve.post("s", b"{", path=path)).status_code == 400
        assert (await serve.http.get(serve.base_url + path)).status_code == 405
        assert (await serve.http.post(serve.base_url + path, json={})).status_code == 401


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stream": 1}, "stream"),
        ({"system": 7}, "system"),
        ({"system": [{"type": "image", "source": {}}]}, "system[0]"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "description": 1}]}, "tools[0].description"),
        ({"tools": {}}, "tools"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": ""}]}]}, "name"),
        (
            {
                "messages": [
                    *HI,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": 1}]},
                ]
            },
            "messages[1].content[0].input",
        ),
        (
            {"messages": [*HI, {"role": "assistant", "content": [{"type": "thinking"}]}]},
            "messages[1].content[0].thinking",
        ),
        ({"messages": [{"role": "user", "content": [text("hi"), result("a", "x")]}], "system": "s"}, "messages[0]: "),
    ],
)
async def test_a_bad_field_is_named_in_the_message(codec: TurnCodec, fields: Json, path: str):
    async with serving(codec, [{"text": "ok"}]) as serve:
        messages = fields.pop("messages", HI)
        assert path in await refused(serve, "s", messages, **fields)
        assert serve.calls() == []


async def test_errors_have_the_types_that_sdks_raise(codec: TurnCodec):
    async with (
        serving(codec, [{"error": "500"}], rollout_max_context_len=64) as serve,
        sdk(serve, "s") as client,
        sdk(serve, "a b") as stranger,
    ):
        hi: Any = {"model": "m", "max_tokens": 9, "messages": HI}
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await client.messages.create(**{**hi, "messages": [{"role": "user", "content": "~" * 64}]})
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await client.messages.create(**{**hi, "messages": [{"role": "user", "content": "~" * 60000}]})
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(**hi)
        with pytest.raises(anthropic.InternalServerError) as caught:
            await client.messages.create(**hi)
        assert caught.value.status_code == 503 and caught.value.body["error"]["type"] == "api_error"  # type: ignore[index]
        with pytest.raises(anthropic.APIStatusError, match="inference engine failed"):
            async with client.messages.stream(**hi) as stream:
                await stream.get_final_message()
        ping, error = events((await post(serve, "s", HI, stream=True)).text)
        assert (ping["type"], error["error"]["type"]) == ("ping", "api_error")
        assert error["request_id"] == serve.session("s").requests[-1].request_id
        await serve.registry.end("s")
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**hi)


async def test_fields_that_mean_nothing_are_counted(codec: TurnCodec):
    async with serving(codec, [{"text": "ok"}]) as serve:
        fields = {
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "metadata": {},
            "tool_choice": {"type": "any"},
        }
        await ask(serve, "s", HI, **fields, temperature=0.5, frobnicate=1)
        (record,) = serve.session("s").requests
        assert record.ignored_fields == ["frobnicate", "metadata", "temperature", "thinking", "tool_choice"]
        assert (record.protocol, record.http_status) == ("messages", 200)


async def test_template_arguments_and_tools_select_the_subtree(codec: TurnCodec):
    async with serving(codec, [{"text": "ok"}]) as serve:
        first = await ask(serve, "s", HI, tools=TOOLS, chat_template_kwargs={"x": 1})
        history = [*HI, {"role": "assistant", "content": first["content"]}, MORE]
        kinds = [
            (await post(serve, "s", history, **fields)).headers["x-silva-match"]
            for fields in (
                {"tools": TOOLS, "chat_template_kwargs": {"x": 1}},
                {"tools": TOOLS},
                {"chat_template_kwargs": {"x": 1}},
            )
        ]
        assert kinds == ["append", "root", "root"]


async def test_both_protocols_meet_in_one_session(codec: TurnCodec):
    async with serving(codec, [{"text": TURN}, {"text": "ok"}]) as serve:
        first = await serve.message("s", HI)
        blocks: list[Json] = [{"type": "thinking", "thinking": first["reasoning"], "signature": "x"}, text("Look.")]
        calls = [(call["id"], json.loads(call["function"]["arguments"])) for call in first["tool_calls"]]
        blocks += [{"type": "tool_use", "id": call_id, "name": "look", "input": value} for call_id, value in calls]
        results = {"role": "user", "content": [result(call_id, "r") for call_id, _ in calls]}
        answer = await post(serve, "s", [*HI, {"role": "assistant", "content": blocks}, results])
        assert answer.headers["x-silva-match"] == "append"


async def test_a_lost_client_ends_its_turn(codec: TurnCodec):
    async with serving(codec, [{"error": "hang"}]) as serve:
        client = RawClient(serve.server.port, "s")
        await client.send({"messages": HI, "max_tokens": 5, "stream": True}, path="/v1/messages")
        await until(lambda: serve.calls("s"))
        client.abort()
        await until(lambda: serve.session("s").requests[0].error_code == "client_disconnected")
        assert serve.forest("s").nodes == []
