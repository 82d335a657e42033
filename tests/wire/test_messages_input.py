"""Reading Messages bodies: every JSON is read or refused with its place."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from body_reader import JSON, BodyReader, messages_of
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.forest.identity import root_key
from silva.types.errors import RequestError
from silva.wire.chat_format import ChatFormat
from silva.wire.history import HistoryCache
from silva.wire.messages_format import MessagesFormat
from silva.wire.model_request import ModelRequest

USER: dict[str, Any] = {"role": "user", "content": "hi"}
BODIES = BodyReader(MessagesFormat())


def parse(body: Any, history: HistoryCache | None = None) -> ModelRequest:
    return BODIES.parse(body if isinstance(body, bytes) else {"max_tokens": 9, **body}, history)


def test_system_text_and_a_message_of_the_same_bytes_never_meet_in_the_cache():
    history = HistoryCache()
    parse({"system": "hi", "messages": [USER]}, history)
    with pytest.raises(RequestError, match=r"messages\[0\]"):
        parse({"messages": ["hi"]}, history)
    blocks = [{"type": "text", "text": "x"}]
    parse({"system": blocks, "messages": [USER]}, history)
    with pytest.raises(RequestError, match=r"messages\[1\]"):
        parse({"messages": [USER, blocks]}, history)


def test_a_message_that_is_several_is_read_once_and_found_piece_by_piece():
    results = [{"type": "tool_result", "tool_use_id": f"t{n}", "content": f"r{n}"} for n in range(3)]
    body = {
        "system": "be brief",
        "messages": [USER, {"role": "user", "content": [*results, {"type": "text", "text": "x"}]}],
    }
    history = HistoryCache()
    first = parse(body, history)
    assert [message.role for message in messages_of(first)] == ["system", "user", "tool", "tool", "tool", "user"]
    assert [first.path_of(index) for index in range(6)] == ["system", "messages[0]", *["messages[1]"] * 4]
    again = parse(body, history)
    assert again.digests == first.digests
    whole = messages_of(first)
    for start in range(7):
        for stop in range(7):
            assert again.messages_between(start, stop) == whole[start:stop]


def test_the_cache_keeps_no_item_of_very_many_messages():
    history = HistoryCache()
    for count in (2, 5000):
        results = [{"type": "tool_result", "tool_use_id": "t", "content": f"{n}"} for n in range(count)]
        body = {"messages": [{"role": "user", "content": results}]}
        first = parse(body, history)
        assert len(first.digests) == count
        assert parse(body, history).digests == first.digests
        assert len(history) == 1


def test_a_tool_is_the_same_as_in_chat():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    ours = parse(
        {
            "messages": [USER],
            "tools": [
                {"name": "f", "description": "d", "input_schema": {**schema, "$schema": "x"}, "cache_control": {}},
                {"type": "custom", "name": "g"},
                {"type": "web_search_20250305", "name": "web_search"},
            ],
        }
    )
    functions = [{"name": "f", "description": "d", "parameters": schema}, {"name": "g"}]
    chat = {"messages": [USER], "tools": [{"type": "function", "function": function} for function in functions]}
    theirs = ChatFormat().parse(msgspec.json.encode(chat), HistoryCache())
    assert root_key(ours.conversation) == root_key(theirs.conversation)
    assert ours.options.ignored_fields == ("tools[2]:web_search_20250305",)


def test_the_input_of_a_call_is_one_text_in_any_spacing():
    blocks = b'[{"type":"tool_use","id":"a","name":"f","input":%s},{"type":"tool_use","id":"b","name":"f"}]'
    body = b'{"max_tokens":1,"messages":[{"role":"user","content":"x"},{"role":"assistant","content":' + blocks + b"}]}"
    texts: set[str] = set()
    for given_input in (b'{"b":1.0,"a":[ "\xc3\xbc" ]}', b'{\n  "b": 1.0,\n  "a": ["\xc3\xbc"]\n}'):
        first, second = messages_of(parse(body % given_input))[1].tool_calls
        texts.add(first.arguments)
        assert second.arguments == "{}"
    assert texts == {'{"b": 1.0, "a": ["ü"]}'}


@pytest.mark.parametrize("depth", [90, 400, 900, 50_000])
@pytest.mark.parametrize(
    "template",
    [
        b'{"max_tokens":1,"system":%s,"messages":[{"role":"user","content":"x"}]}',
        b'{"max_tokens":1,"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":%s}]}]}',
        b'{"max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":%s}]}]}',
        b'{"max_tokens":1,"messages":[{"role":"user","content":"x"}],"tools":[{"name":"f","input_schema":%s}]}',
        b'{"max_tokens":1,"messages":[{"role":"user","content":"x"}],"thinking":%s}',
    ],
)
def test_deep_values_are_read_or_refused(template: bytes, depth: int):
    try:
        request = parse(template % (b'{"a":' * depth + b"1" + b"}" * depth))
        root_key(request.conversation)
        assert messages_of(request)
    except RequestError as error:
        assert error.status == 400


WORD = st.text(max_size=6)
TEXT = st.fixed_dictionaries({"type": st.just("text"), "text": WORD})
RESULT = st.fixed_dictionaries(
    {"type": st.just("tool_result"), "tool_use_id": st.text(min_size=1, max_size=3)},
    optional={"content": WORD | st.lists(TEXT, max_size=2) | JSON, "is_error": st.booleans() | JSON},
)
CALL = st.fixed_dictionaries(
    {"type": st.just("tool_use"), "id": st.text(min_size=1), "name": st.text(min_size=1)},
    optional={"input": st.dictionaries(WORD, JSON, max_size=2) | JSON},
)
THOUGHT = st.fixed_dictionaries({"type": st.just("thinking"), "thinking": WORD}, optional={"signature": JSON})
MESSAGE = (
    st.fixed_dictionaries({"role": st.just("user"), "content": st.lists(TEXT | RESULT, min_size=1, max_size=4)})
    | st.fixed_dictionaries({"role": st.just("assistant"), "content": st.lists(TEXT | CALL | THOUGHT, max_size=4)})
    | st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": WORD | JSON})
    | JSON
)
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, min_size=1, max_size=4) | JSON},
    optional={
        "system": WORD | st.lists(TEXT, max_size=2) | JSON,
        "tools": st.lists(st.fixed_dictionaries({"name": WORD}, optional={"input_schema": JSON, "type": JSON})) | JSON,
        **{name: JSON for name in ("stop_sequences", "stream", "max_tokens", "chat_template_kwargs", "model")},
    },
)


@settings(max_examples=200, deadline=None)
@given(BODY)
def test_any_json_is_read_or_refused_with_its_place(body: dict[str, Any]):
    history = HistoryCache()
    request = BODIES.read_or_refuse({"max_tokens": 9, **body}, history)
    if request is None:
        return
    messages = messages_of(request)
    half = len(messages) // 2
    assert parse(body, history).messages_between(half, len(messages)) == messages[half:]
    assert all(request.path_of(index).split("[")[0] in ("system", "messages") for index in range(len(messages)))
