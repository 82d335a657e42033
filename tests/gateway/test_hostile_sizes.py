"""Requests that are too much: refused at once, each with the field that is too large; and nothing else is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_serve import Json, serving

from silva.codec import TurnCodec
from silva.forest.identity import message_digest
from silva.forest.session_forest import SessionForest
from silva.gateway.http import BodyTooLarge, read_request_body
from silva.turns.refusals import refuse_hopeless
from silva.types.errors import RequestError
from silva.types.messages import Conversation, Message, ToolCall
from silva.types.turn import TurnOptions
from silva.wire.fields import MAX_IGNORED_NAMES, MAX_MESSAGES
from silva.wire.model_request import ModelRequest

HI: list[Json] = [{"role": "user", "content": "hi"}]
CALLED = Message(role="assistant", tool_calls=tuple(ToolCall(id=f"c{i}", name="f", arguments="{}") for i in range(60)))


def call(arguments: str) -> Json:
    return {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": arguments}}]}


def tool(description: str) -> Json:
    return {"type": "function", "function": {"name": "f", "description": description}}


async def test_what_can_never_fit_is_refused_before_it_is_encoded(codec: TurnCodec, monkeypatch: pytest.MonkeyPatch):
    long = "a b " * 20_000
    bodies: dict[str, tuple[Json, str]] = {
        "text": ({"messages": [{"role": "user", "content": long}]}, "messages"),
        "arguments": ({"messages": [*HI, call(json.dumps({"a": long})), *HI]}, "messages"),
        "reasoning": ({"messages": [*HI, {"role": "assistant", "reasoning": long}, *HI]}, "messages"),
        "many": ({"messages": HI * 600}, "messages"),
        "tools": ({"messages": HI, "tools": [tool(long)]}, "tools"),
        "kwargs": ({"messages": HI, "chat_template_kwargs": {"k": long}}, "chat_template_kwargs"),
    }

    def encode(*_: object) -> Any:
        raise AssertionError("it was encoded")

    async with serving(codec, [{"text": "x"}], engine_context_len=512) as serve:
        with monkeypatch.context() as patch:
            patch.setattr(TurnCodec, "encode_root", encode)
            for name, (body, field) in bodies.items():
                answer = await serve.post("s", body)
                error = answer.json()["error"]
                assert answer.status_code == 400, name
                assert (error["code"], error["param"]) == ("context_length_exceeded", field), name
                assert "512 tokens" in error["message"]
        await serve.chat("s", HI)
        assert [record.http_status for record in serve.session("s").requests] == [400] * len(bodies) + [200]


def request(*messages: Message, tools: tuple[Json, ...] = ()) -> tuple[ModelRequest, Any]:
    conversation = Conversation(tools=tools, template_kwargs={})
    digests = [message_digest(message) for message in messages]
    made = ModelRequest(
        options=TurnOptions(),
        conversation=conversation,
        digests=digests,
        messages_between=lambda start, stop: messages[start:stop],
    )
    return made, SessionForest().match(conversation, digests)


@pytest.mark.parametrize(
    ("message", "fits"),
    [
        (Message(role="user", content="x" * 64 * 199), True),
        (Message(role="user", content="x" * 64 * 201), False),
        (Message(role="user", content="x" * 64 * 401), False),
        (CALLED, True),
    ],
)
def test_long_tokens_get_the_benefit_of_the_doubt(message: Message, fits: bool):
    """Tokens of 64 characters and room for 100: up to twice the room is left for the real encoding to say."""

    def check() -> None:
        made, match = request(message)
        refuse_hopeless(made, match, limit=100, longest_token=64, encode=lambda text: [0] * (len(text) // 64))

    if fits:
        check()
    else:
        with pytest.raises(RequestError, match="can never fit"):
            check()


def test_calls_count_as_parts():
    made, match = request(CALLED, CALLED)
    with pytest.raises(RequestError, match="are 122, calls and images included"):
        refuse_hopeless(made, match, limit=100, longest_token=64, encode=lambda text: [])


async def test_the_number_of_messages_and_of_recorded_names_has_an_end(codec: TurnCodec):
    async with serving(codec, [{"text": "x"}]) as serve:
        answer = await serve.post("s", {"messages": HI * (MAX_MESSAGES + 1)})
        assert answer.status_code == 400 and str(MAX_MESSAGES) in answer.json()["error"]["message"]
        await serve.chat("s", HI, **{f"k{i:04}": 1 for i in range(1000)})
        names = serve.session("s").requests[1].ignored_fields
        assert names[:2] == ["k0000", "k0001"] and len(names) == MAX_IGNORED_NAMES + 1
        assert names[-1] == f"(and {1000 - MAX_IGNORED_NAMES} more)"


async def test_any_number_of_odd_texts_in_tools_and_template_arguments_is_encoded_exactly(codec: TurnCodec):
    tools = [
        {
            "type": "function",
            "function": {"name": f"f{i}", "description": f'`call` <f{i}>\n"now"', "parameters": {"type": "object"}},
        }
        for i in range(12)
    ]
    kwargs = {f"k{i}": f"`odd` {i}" for i in range(12)}
    async with serving(codec, [{"text": "yes"}]) as serve:
        await serve.chat("s", HI, tools=tools, chat_template_kwargs=kwargs)
        expected = codec.tokenizer.apply_chat_template(
            HI, tools=tools, add_generation_prompt=True, return_dict=False, **kwargs
        )
        assert serve.calls("s")[0]["input_ids"] == list(expected)
        serve.sample("s")


async def test_a_client_that_waits_for_100_continue_is_refused_before_it_writes():
    async def receive() -> Any:
        raise AssertionError("nothing may be read: the client has not begun to write")

    headers = [(b"content-length", b"11"), (b"expect", b"100-Continue")]
    with pytest.raises(BodyTooLarge):
        await read_request_body({"headers": headers}, receive, limit=10)


async def test_a_body_without_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("silva.gateway.http.MAX_DRAINED_BYTES", 100)
    events = iter([{"type": "http.request", "body": b"x" * 10, "more_body": True}] * 11)

    async def receive() -> Any:
        return next(events)

    with pytest.raises(BodyTooLarge):
        await read_request_body({"headers": []}, receive, limit=10)
    assert list(events) == []
