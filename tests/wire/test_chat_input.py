"""What the Chat dialect accepts, what it refuses and how it names the place. Pure: no server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from body_reader import JSON, BodyReader, messages_of
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.forest.identity import message_digest, root_key
from silva.types.errors import RequestError
from silva.types.messages import Message
from silva.wire.chat_format import ChatFormat
from silva.wire.history import MAX_PLAIN_BYTES, HistoryCache
from silva.wire.images import RequestImages

USER = {"role": "user", "content": "hi"}


BODIES = BodyReader(ChatFormat())
parse, refusal = BODIES.parse, BODIES.refusal


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("text", "messages[1]"),
        (None, "messages[1]"),
        ([], "messages[1]"),
        ({}, "messages[1].role"),
        ({"role": "function", "content": "x"}, "messages[1].role"),
        ({"role": 3, "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": {"text": "x"}}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": "x"}, 7]}, "messages[1].content[1]"),
        ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [7]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[1].tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [{"id": 4, "function": {"name": "f"}}]}, "messages[1].tool_calls[0].id"),
        ({"role": "tool", "tool_call_id": 7, "content": "x"}, "messages[1].tool_call_id"),
    ],
)
def test_a_bad_message_is_refused_by_its_path(message: Any, field: str):
    assert refusal({"messages": [USER, message]}).field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": "1"}, "n"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"tools": {}}, "tools"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        *(
            ({"chat_template_kwargs": {name: 1}}, f"chat_template_kwargs.{name}")
            for name in ("add_generation_prompt", "tokenize", "tools", "messages")
        ),
        ({"messages": {}}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
    ],
)
def test_a_bad_field_is_refused_by_its_name(fields: dict[str, Any], field: str):
    assert refusal({"messages": [USER], **fields}).field == field


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"7",
        b"{} x",
        b'{"messages": NaN}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}], "x": 1e999}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}], "x": ' + b"1" * 5000 + b"}",
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "tools": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "\\ud800"}], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        '{"messages": [{"role": "user", "content": "x"}]}'.encode("utf-16"),
    ],
)
def test_bodies_that_are_no_json_object_are_refused(body: bytes):
    refusal(body)


def test_a_surrogate_without_partner_is_replaced():
    body = b'{"messages": [{"role": "user", "content": "a\\ud800b \\ud83d\\ude00"}]}'
    assert messages_of(parse(body))[0].content == "a\ufffdb \U0001f600"


def test_roles_parts_and_reasoning_are_projected():
    call = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": {"b": 1, "a": 1.0}}}
    request = parse(
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
                {**USER, "name": "Ann"},
                {"role": "assistant", "reasoning": "hm", "reasoning_content": None, "tool_calls": [call]},
                {"role": "tool", "id": "c", "content": ""},
                {"role": "assistant", "content": None},
            ]
        }
    )
    system, user, assistant, tool, empty = messages_of(request)
    assert system == Message(role="system", content="be brief")
    assert user == Message(role="user", content="hi")
    assert (assistant.reasoning, json.loads(assistant.tool_calls[0].arguments)) == ("hm", {"b": 1, "a": 1.0})
    assert tool == Message(role="tool", content="(no output)", tool_call_id="c")
    assert empty == Message(role="assistant")


def test_options_are_read():
    request = parse(
        {
            "model": "gpt-x",
            "messages": [USER],
            "stop": "END",
            "seed": -1,
            "stream": None,
            "max_tokens": 7.0,
            "n": 1,
            "logprobs": True,
            "zeta": 1,
            "alpha": 2,
        }
    )
    options = request.options
    assert (options.model, options.stop, options.stream, options.max_tokens) == ("gpt-x", ("END",), False, 7)
    assert options.seed is not None and 0 <= options.seed < 1 << 63
    assert options.logprobs and options.ignored_fields == ("alpha", "zeta")


def test_tools_are_flattened_skipped_and_recorded():
    nested = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
    flat = {"type": "function", "name": "b", "parameters": {"type": "object"}, "strict": False}
    request = parse(
        {
            "messages": [USER],
            "tools": [nested, {"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [flat]}],
        }
    )
    assert [tool["function"]["name"] for tool in request.conversation.tools] == ["a", "b"]
    assert request.options.ignored_fields == ("tools[1]:web_search",)
    plain = parse({"messages": [USER], "tools": [nested, flat]})
    assert root_key(request.conversation) == root_key(plain.conversation)
    assert parse({"messages": [USER], "tools": []}).conversation == parse({"messages": [USER]}).conversation


def test_an_unchanged_history_is_not_read_again(monkeypatch: pytest.MonkeyPatch):
    from silva.wire import chat_format

    read: list[str] = []
    original = chat_format.project_message

    def counting(raw: Any, at: str, images: RequestImages) -> Message:
        read.append(at)
        return original(raw, at, images)

    monkeypatch.setattr(chat_format, "project_message", counting)
    history = HistoryCache()
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{n} " + "x" * n} for n in range(150)]
    first = parse({"messages": messages}, history)
    assert len(read) == 150
    messages.append({"role": "user", "content": "new"})
    second = parse({"messages": messages}, history)
    assert read[150:] == ["messages[150]"]
    assert second.digests[:150] == first.digests
    assert second.digests == [message_digest(message) for message in messages_of(second)]


def test_the_cache_is_bounded_and_holds_no_long_text():
    history = HistoryCache(max_entries=64)
    for number in range(1000):
        parse({"messages": [{"role": "user", "content": f"{number}" * 100}]}, history)
    assert len(history) <= 64
    assert all(len(key) <= MAX_PLAIN_BYTES for key in history._digests)


MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "system", "assistant", "tool", "developer"]) | JSON,
        "content": st.text(max_size=12)
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": JSON}))
        | JSON,
        "tool_calls": st.lists(
            st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": st.text(), "arguments": JSON})}),
            max_size=2,
        )
        | JSON,
        "tool_call_id": JSON,
        "reasoning_content": JSON,
    },
)
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=4) | JSON},
    optional={
        name: JSON
        for name in ("tools", "stop", "seed", "n", "stream", "max_tokens", "chat_template_kwargs", "logprobs", "model")
    },
)


@settings(max_examples=120, deadline=None)
@given(BODY)
def test_any_json_is_read_or_refused_with_its_place(body: dict[str, Any]):
    BODIES.read_or_refuse(body, HistoryCache())


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_read(noise: bytes):
    for body in (noise, b'{"messages":[{"role":"user","content":"' + noise + b'"}]}'):
        try:
            messages_of(parse(body))
        except RequestError as error:
            assert 400 <= error.status < 500
