"""A named family's parser behind the real door: types from the request's tools, echoes, and reasoning tokens."""

from __future__ import annotations

import json

from gateway_serve import Json, serving

from silva.codec import TurnCodec
from silva.parsers import TurnParser

TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "book",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "nights": {"type": "integer"}, "tags": {"type": "array"}},
            },
        },
    }
]
USER: Json = {"role": "user", "content": "book it"}


async def test_an_xml_call_gets_its_types_from_the_tools_and_its_echo_appends(codec: TurnCodec) -> None:
    said = (
        "<think>\nplan\n</think>\n\nsure\n\n<tool_call>\n<function=book>\n<parameter=city>\n12\n</parameter>\n"
        '<parameter=nights>\n3\n</parameter>\n<parameter=tags>\n["é"]\n</parameter>\n</function>\n</tool_call>'
    )
    parser = TurnParser.from_names(reasoning="qwen3", tool_call="qwen3_coder")
    async with serving(codec, [{"text": said}, {"text": "done"}], parser=parser) as serve:
        answer = await serve.chat("s", [USER], tools=TOOLS)
        message = answer["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert (message["content"], message["reasoning_content"]) == ("sure", "plan")
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert json.loads(call["function"]["arguments"]) == {"city": "12", "nights": 3, "tags": ["é"]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "booked"}
        await serve.chat("s", [USER, message, result], tools=TOOLS)
        records = serve.session("s").requests
        assert [(record.match, record.repairs) for record in records] == [("root", []), ("append", [])]
        serve.sample("s")


async def test_reasoning_tokens_are_counted_up_to_the_familys_own_mark(codec: TurnCodec) -> None:
    thought = "<|channel|>analysis<|message|>hm, well<|end|>"
    said = thought + "<|start|>assistant<|channel|>final<|message|>done"
    parser = TurnParser.from_names(reasoning="gpt-oss", tool_call="gpt-oss")
    async with serving(codec, [{"text": said}], parser=parser) as serve:
        answer = await serve.chat("s", [USER])
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("done", "hm, well")
        num = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        ids = list(serve.responses("s")[0].sampled)
        assert thought in codec.decode(ids[:num]) and thought not in codec.decode(ids[: num - 1])


async def test_a_call_that_a_limit_cut_goes_on_under_its_id(codec: TurnCodec) -> None:
    said = "<tool_call>\n<function=book>\n<parameter=nights>\n3\n</parameter>\n"
    script = [{"text": said, "finish_reason": "length"}, {"text": "</function>\n</tool_call>"}]
    parser = TurnParser.from_names(reasoning="none", tool_call="qwen3_coder")
    async with serving(codec, script, parser=parser) as serve:
        first = (await serve.chat("s", [USER], tools=TOOLS))["choices"][0]
        (cut,) = first["message"]["tool_calls"]
        assert first["finish_reason"] == "length"
        assert cut["function"]["arguments"] == "<parameter=nights>\n3\n</parameter>"
        second = (await serve.chat("s", [USER, first["message"]], tools=TOOLS))["choices"][0]
        (whole,) = second["message"]["tool_calls"]
        assert (whole["id"], whole["function"]["arguments"]) == (cut["id"], '{"nights": 3}')
