"""Responses as real clients use it: the SDK over loopback, replies, event by event streams, echoes and errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from gateway_serve import Json, Serve, serving
from manual_clock import ManualClock
from raw_http import RawClient

from silva.codec import TurnCodec

PATH = "/v1/responses"
USER: Json = {"role": "user", "content": "hi"}
PARAMETERS: Json = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS: list[Json] = [{"type": "function", "name": "f", "description": "d", "parameters": PARAMETERS, "strict": False}]


def turn(reasoning: str, content: str, *arguments: int) -> Json:
    calls = "".join(f'\n<tool_call>\n{{"name": "f", "arguments": {{"a": {a}}}}}\n</tool_call>' for a in arguments)
    return {"text": f"<think>\n{reasoning}\n</think>\n\n{content}{calls}"}


TURN = turn("plan", "Look.", 1, 2)


def results(output: list[Any]) -> list[Json]:
    calls = [item for item in output if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": c["call_id"], "output": c["arguments"]} for c in calls]


def events_of(text: str) -> list[Json]:
    frames = [frame.split("\n") for frame in text.split("\n\n") if frame.startswith("event: ")]
    events = [json.loads(frame[1].removeprefix("data: ")) for frame in frames]
    assert [frame[0].removeprefix("event: ") for frame in frames] == [event["type"] for event in events]
    return events


async def respond(serve: Serve, session_id: str, items: Any, **fields: Any) -> Json:
    answer = await serve.post(session_id, {"model": "m", "input": items, **fields}, PATH)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_the_sdk_gets_every_part_of_a_reply(codec: TurnCodec):
    async with serving(codec, [TURN]) as serve:
        tools: Any = TOOLS
        reply = await serve.sdk("s").responses.create(model="gpt-x", input="hi", tools=tools, max_output_tokens=99)
        reasoning, message, one, two = reply.output
        assert reasoning.type == "reasoning" and reasoning.summary[0].text == "plan" and reasoning.encrypted_content
        assert message.type == "message" and message.role == "assistant" and message.content[0].type == "output_text"
        assert (reply.output_text, message.content[0].annotations, message.status) == ("Look.", [], "completed")
        assert one.type == two.type == "function_call"
        assert (one.name, one.arguments, two.arguments, one.status) == ("f", '{"a": 1}', '{"a": 2}', "completed")
        assert len({item.id for item in reply.output}) == 4 and one.call_id != two.call_id
        assert (reply.object, reply.model, reply.status, reply.error) == ("response", "gpt-x", "completed", None)
        assert reply.id.startswith("resp_") and reply.created_at > 0 and reply.incomplete_details is None
        assert [tool.to_dict() for tool in reply.tools] == [{**TOOLS[0], "strict": None}]
        assert (reply.tool_choice, reply.parallel_tool_calls, reply.max_output_tokens) == ("auto", True, 99)
        usage = reply.usage
        assert usage is not None and usage.input_tokens == len(serve.calls("s")[0]["input_ids"])
        assert usage.output_tokens == len(serve.responses("s")[0].sampled)
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
        assert usage.input_tokens_details.cached_tokens == 0
        (record,) = serve.session("s").requests
        assert (record.protocol, record.http_status, record.ignored_fields) == ("responses", 200, [])


async def test_the_sdk_assembles_the_stream(codec: TurnCodec):
    async with serving(codec, [TURN]) as serve:
        whole = await respond(serve, "plain", "hi")
        seen: list[str] = []
        async with serve.sdk("stream").responses.stream(model="m", input="hi") as stream:
            async for event in stream:
                seen.append(event.type)
            final = await stream.get_final_response()
        assert seen[0] == "response.created" and seen[-1] == "response.completed"
        streamed = json.loads(final.model_dump_json())
        for item, expected in zip(streamed["output"], whole["output"], strict=True):
            own = ("id", "encrypted_content")
            assert {k: item[k] for k in expected if k not in (*own, "content")} == {
                k: v for k, v in expected.items() if k not in (*own, "content")
            }
        assert final.output_text == "Look." and final.usage is not None
        assert final.usage.output_tokens == whole["usage"]["output_tokens"]
        one, two = serve.responses("plain")[0], serve.responses("stream")[0]
        assert (one.ids, one.finish, one.key) == (two.ids, two.finish, two.key)


async def test_a_stream_tells_each_item_in_full(codec: TurnCodec):
    async with serving(codec, [TURN]) as serve:
        answer = await serve.post("s", {"input": "hi", "stream": True}, PATH)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.startswith(": connected\n\nevent: response.created\n") and "[DONE]" not in answer.text
        events = events_of(answer.text)
        call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
        assert [event["type"].removeprefix("response.") for event in events] == [
            "created",
            "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
            "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done",
            "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
            "output_item.done",
            *call, "output_item.done", *call, "output_item.done",
            "completed",
        ]  # fmt: skip
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        created, completed = events[0]["response"], events[-1]["response"]
        assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
        assert created["id"] == completed["id"]
        done = [event for event in events if event["type"] == "response.output_item.done"]
        assert [event["item"] for event in done] == completed["output"]
        assert [event["output_index"] for event in done] == [0, 1, 2, 3]
        for event in events:
            if "item_id" in event:
                assert event["item_id"] == completed["output"][event["output_index"]]["id"]
        text = {event["type"]: event for event in events}
        assert text["response.reasoning_summary_text.delta"]["delta"] == "plan"
        assert text["response.output_text.delta"]["delta"] == text["response.output_text.done"]["text"] == "Look."


def _dumped(items: list[Any], form: str) -> list[Json]:
    if form == "nulls":
        return [item.model_dump() for item in items]
    dumped = [item.model_dump(exclude_none=True) for item in items]
    if form == "referenced":
        return [{"type": "item_reference", "id": item["id"]} for item in dumped]
    if form == "mixed":
        return [{"id": item["id"]} if at % 2 else item for at, item in enumerate(dumped)]
    if form == "bare":
        dumped = [{k: v for k, v in item.items() if k not in ("id", "status", "encrypted_content")} for item in dumped]
    return dumped


@pytest.mark.slow
@pytest.mark.parametrize("form", ["plain", "nulls", "bare", "referenced", "mixed"])
async def test_three_turns_with_parallel_calls_are_one_line(codec: TurnCodec, form: str):
    script = [TURN, turn("and", "More.", 3), turn("so", "Done.")]
    async with serving(codec, script) as serve:
        client: Any = serve.sdk("s")
        items: list[Any] = [USER]
        for _ in range(3):
            reply = await client.responses.create(model="m", input=items, instructions="be brief", tools=TOOLS)
            plain = [item.model_dump() for item in reply.output]
            items += [*_dumped(reply.output, form), *(results(plain) or [{"role": "user", "content": "next"}])]
        assert [record.match for record in serve.session("s").requests] == ["root", "append", "append"]
        sample = serve.sample("s")
        assert sample.num_turns == 3


async def test_references_are_those_of_the_session(codec: TurnCodec):
    async with serving(codec, [TURN]) as serve:
        reply = await respond(serve, "s", "hi")
        items = [USER, {"type": "item_reference", "id": reply["output"][1]["id"]}, USER]
        with pytest.raises(openai.BadRequestError, match="store: false") as caught:
            await serve.sdk("other").responses.create(model="m", input=items)  # type: ignore[arg-type]
        assert (caught.value.code, caught.value.param) == ("unknown_item", "input[1].id")
        assert await respond(serve, "s", items)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_turn_is_incomplete_and_can_be_continued(codec: TurnCodec, stream: bool):
    async with serving(codec, [{"text": "one two three four"}, {"text": " five"}, {"text": "ok"}]) as serve:
        fields = {"input": [USER], "max_output_tokens": 2, "stream": stream}
        answer = await serve.post("s", fields, PATH)
        reply = events_of(answer.text)[-1]["response"] if stream else answer.json()
        if stream:
            assert events_of(answer.text)[-1]["type"] == "response.incomplete"
        assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [item["status"] for item in reply["output"]] == ["incomplete"]
        assert reply["usage"]["output_tokens"] == 2
        more = await respond(serve, "s", [USER, *reply["output"]])
        assert more["output"][0]["content"][0]["text"] == " five"
        assert [record.match for record in serve.session("s").requests] == ["root", "append"]
        await respond(serve, "s", [USER, *reply["output"], *more["output"], {"role": "user", "content": "next"}])
        assert serve.session("s").requests[2].match == "append"
        serve.sample("s")


async def test_two_turns_without_a_word_between_them_are_still_two_turns(codec: TurnCodec):
    script = [turn("one", "A"), turn("two", "B", 1), {"text": "C"}, {"text": "D"}]
    async with serving(codec, script) as serve:
        first = await respond(serve, "s", [USER])
        second = await respond(serve, "s", [USER, *first["output"]])
        items = [USER, *first["output"], *second["output"]]
        third = await respond(serve, "s", items)
        await respond(serve, "s", [*items, *third["output"], *results(second["output"])])
        records = serve.session("s").requests
        assert [(record.match, record.repairs) for record in records] == [("root", []), *[("append", [])] * 3]
        assert serve.sample("s").num_turns == 4
        (observation,) = [node for node in serve.forest("s").nodes if node.kind == "observation"][1:]
        assert [message.role for message in observation.messages] == ["tool"]


async def test_an_empty_generation_has_no_items(codec: TurnCodec):
    async with serving(codec, [{"text": ""}]) as serve:
        reply = await serve.sdk("s").responses.create(model="m", input="hi")
        assert (reply.output, reply.output_text, reply.status) == ([], "", "completed")
        answer = await serve.post("s", {"input": "hi", "stream": True}, PATH)
        assert [event["type"] for event in events_of(answer.text)] == ["response.created", "response.completed"]


def _as_chat(items: list[Json], output: list[list[Json]]) -> list[Json]:
    """The Chat messages of a history whose assistant turns stand in `output`."""
    messages: list[Json] = []
    for item in items:
        if item in [said for turn_items in output for said in turn_items]:
            fresh = not messages or messages[-1]["role"] != "assistant"
            message = {"role": "assistant", "content": None, "tool_calls": []} if fresh else messages.pop()
            if item["type"] == "reasoning":
                message["reasoning_content"] = item["summary"][0]["text"]
            elif item["type"] == "message":
                message["content"] = item["content"][0]["text"]
            else:
                function = {"name": item["name"], "arguments": item["arguments"]}
                message["tool_calls"].append({"id": item["call_id"], "type": "function", "function": function})
            messages.append(message)
        elif item.get("type") == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        else:
            messages.append(item)
    return messages


async def test_the_same_conversation_through_chat_has_the_same_tokens(codec: TurnCodec):
    script = [TURN, turn("and", "", 3), {"text": "Done."}]
    nested = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}]
    async with serving(codec, script) as serve:
        items, output = [USER], []
        for _ in range(3):
            reply = await respond(serve, "responses", items, instructions="be brief", tools=TOOLS)
            system = {"role": "system", "content": "be brief"}
            chat = await serve.chat("chat", [system, *_as_chat(items, output)], tools=nested)
            one, two = reply["usage"], chat["usage"]
            assert (one["input_tokens"], one["output_tokens"]) == (two["prompt_tokens"], two["completion_tokens"])
            assert one["output_tokens_details"] == two["completion_tokens_details"]
            assert one["input_tokens_details"] == two["prompt_tokens_details"]
            output.append(reply["output"])
            items += [*reply["output"], *(results(reply["output"]) or [{"role": "user", "content": "next"}])]
        given = [[call["input_ids"] for call in serve.calls(session)] for session in ("responses", "chat")]
        assert given[0] == given[1]
        keys = [[node.key for node in serve.forest(session).nodes] for session in ("responses", "chat")]
        assert keys[0] == keys[1]
        one, two = serve.sample("responses"), serve.sample("chat")
        assert (one.token_ids, one.loss_mask, one.num_turns) == (two.token_ids, two.loss_mask, two.num_turns)


async def test_a_stream_breathes_in_comments_until_the_turn_is_there(codec: TurnCodec):
    clock = ManualClock()
    async with serving(codec, [{"text": "ok", "delay_s": 50.0}], clock=clock) as serve:
        client = RawClient(serve.server.port, "s")
        await client.send({"input": "hi", "stream": True}, PATH)
        assert (await client.head())[0] == 200
        assert await client.chunk() == b": connected\n\n"
        for _ in range(3):
            coming = asyncio.create_task(client.chunk())
            await clock.advance(15)
            assert await coming == b": waiting\n\n"
        coming = asyncio.create_task(client.chunk())
        await clock.advance(6)
        burst = events_of((await coming).decode())
        assert (burst[0]["type"], burst[-1]["type"]) == ("response.created", "response.completed")
        client.abort()


async def test_a_failure_inside_a_stream_is_a_failed_response(codec: TurnCodec):
    async with serving(codec, [{"error": "500"}]) as serve:
        answer = await serve.post("s", {"model": "gpt-x", "input": "hi", "stream": True}, PATH)
        assert answer.status_code == 200
        created, failed = events_of(answer.text)
        assert (created["type"], failed["type"]) == ("response.created", "response.failed")
        response = failed["response"]
        assert response["id"] == created["response"]["id"] != "resp_"
        assert (response["status"], response["model"], response["output"]) == ("failed", "gpt-x", [])
        assert response["error"]["code"] == "engine_error" and "engine failed" in response["error"]["message"]
        seen = [event.type async for event in await serve.sdk("s").responses.create(model="m", input="x", stream=True)]
        assert seen == ["response.created", "response.failed"]
        plain = await serve.post("s", {"input": "hi"}, PATH)
        assert (plain.status_code, plain.json()["error"]["code"]) == (503, "engine_error")
        assert serve.forest("s").nodes == []


async def test_what_fails_before_generation_is_an_http_error_in_the_sdks_shape(codec: TurnCodec):
    async with serving(codec, [{"text": "ok"}], rollout_max_context_len=40) as serve:
        client: Any = serve.sdk("s")
        for fields, param in [
            ({"input": []}, "input"),
            ({"input": "x " * 2000}, "input"),
            ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
             "input[0].content[0]"),
        ]:  # fmt: skip
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model="m", stream=True, **fields)
            assert caught.value.param == param
        with pytest.raises(openai.AuthenticationError):
            await serve.sdk("not a key!").responses.create(model="m", input="hi")
        assert serve.calls() == []


async def test_what_the_template_refuses_is_told_by_the_place_of_the_item(codec: TurnCodec):
    said = [{"type": "reasoning", "summary": [{"text": "hm"}]}, {"role": "assistant", "content": "no calls"}]
    result = {"type": "function_call_output", "call_id": "c", "output": "x"}
    async with serving(codec, [{"text": "ok"}]) as serve:
        for items, place in [([result], "input[0]"), ([USER, *said, USER, result], "input[4]")]:
            answer = await serve.post("s", {"input": items}, PATH)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "template_refused", place)
