"""Requests shaped as finished agents send them: each client's second request goes on behind its first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gateway_serve import Json, serving

from silva.codec import TurnCodec

CALLS = "".join(f'\n<tool_call>\n{{"name": "run", "arguments": {{"cmd":   "{word}"}}}}\n</tool_call>' for word in "ab")
TURN = "<think>\nTwo at once.\n</think>\n\nI look twice." + CALLS
SCHEMA: Json = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"cmd": {"type": "string"}},
    "additionalProperties": False,
}
Shape = Callable[[Json | None], Json]
"""The body of the first request, or, with the answer to it, of the second."""


def claude_code(answer: Json | None) -> Json:
    """A system message in the history, adaptive thinking, and the failed one of two results first."""
    messages: list[Json] = [
        {"role": "user", "content": [{"type": "text", "text": "count"}]},
        {"role": "system", "content": "# Environment\n - Platform: linux"},
    ]
    if answer is not None:
        first, second = (block["id"] for block in answer["content"] if block["type"] == "tool_use")
        results = [
            {"type": "tool_result", "content": "Exit code 1\nb", "is_error": True, "tool_use_id": second},
            {"tool_use_id": first, "type": "tool_result", "content": "a", "is_error": False},
        ]
        messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
    return {
        "model": "policy",
        "messages": messages,
        "system": [{"type": "text", "text": "You are an agent."}, {"type": "text", "text": "\nUse the tools."}],
        "tools": [{"name": "run", "description": "Runs it.", "input_schema": SCHEMA}],
        "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"0"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
    }


def codex(answer: Json | None) -> Json:
    """Two developer and two user messages, ids of the client's own on all items, reasoning with a null content."""
    items: list[Json] = [
        {"type": "message", "id": f"msg_{n}", "role": role, "content": [{"type": "input_text", "text": f"{role} {n}"}]}
        for n, role in enumerate(("developer", "developer", "user", "user"))
    ]
    for item in answer["output"] if answer else ():
        items.append({**item, "content": None} if item["type"] == "reasoning" else item)
    for item in answer["output"] if answer else ():
        if item["type"] == "function_call":
            output = "Chunk ID: 85749e\nProcess exited with code 0\nOutput:\n1\n"
            items.append(
                {
                    "type": "function_call_output",
                    "id": "fco_" + item["id"],
                    "call_id": item["call_id"],
                    "output": output,
                }
            )
    return {
        "model": "policy",
        "input": items,
        "tools": [{"type": "function", "name": "run", "description": "", "strict": False, "parameters": SCHEMA}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a2",
        "client_metadata": {"turn_id": "01a2" if answer else "01a1"},
    }


def opencode(answer: Json | None) -> Json:
    """Arguments written anew without blanks, one kind of reasoning kept, unread options."""
    messages: list[Json] = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "count"}]
    if answer is not None:
        said = answer["choices"][0]["message"]
        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": "run", "arguments": call["function"]["arguments"].replace(" ", "")},
            }
            for call in said["tool_calls"]
        ]
        echo = {"role": "assistant", "content": said["content"], "reasoning_content": said["reasoning_content"]}
        messages.append({**echo, "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "1\n"} for call in calls]
    return {
        "model": "policy",
        "max_tokens": 32000,
        "messages": messages,
        "tools": [{"type": "function", "function": {"name": "run", "description": "Runs it.", "parameters": SCHEMA}}],
        "tool_choice": "auto",
        "stream_options": {"include_usage": True},
    }


def mini_swe_agent(answer: Json | None) -> Json:
    """The echo as LiteLLM dumps it: no content where it was null, the reasoning twice."""
    body = opencode(answer)
    for message in body["messages"]:
        if message["role"] == "assistant":
            message["provider_specific_fields"] = {"reasoning": message["reasoning_content"]}
    return {name: body[name] for name in ("model", "messages", "tools")}


CLIENTS: dict[str, tuple[str, Shape]] = {
    "claude_code": ("/v1/messages?beta=true", claude_code),
    "codex": ("/v1/responses", codex),
    "opencode": ("/v1/chat/completions", opencode),
    "mini_swe_agent": ("/v1/chat/completions", mini_swe_agent),
}


@pytest.mark.parametrize("name", CLIENTS)
async def test_the_second_request_goes_on_behind_the_first(codec: TurnCodec, name: str):
    path, shape = CLIENTS[name]
    async with serving(codec, [{"text": TURN}, {"text": "done"}]) as serve:
        first = await serve.post("s", shape(None), path)
        assert first.status_code == 200, first.text
        second = await serve.post("s", shape(first.json()), path)
        assert second.status_code == 200, second.text
        assert second.headers["x-silva-match"] == "append"
        assert second.headers["x-silva-repairs"] == "0"
        assert serve.sample("s").num_turns == 2


async def test_results_stand_in_the_order_in_which_the_client_sent_them(codec: TurnCodec):
    path, shape = CLIENTS["claude_code"]
    async with serving(codec, [{"text": TURN}, {"text": "done"}]) as serve:
        await serve.post("s", shape((await serve.post("s", shape(None), path)).json()), path)
        text = codec.decode(serve.calls("s")[1]["input_ids"])
        tail = text.rpartition("I look twice.")[2]
        assert tail.index("[tool error]\nExit code 1\nb") < tail.index("<tool_response>\na\n")
