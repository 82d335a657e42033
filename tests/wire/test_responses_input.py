"""What the Responses dialect accepts, how items become messages, what it refuses. Pure: no server."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from body_reader import JSON, BodyReader, messages_of
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.forest.identity import message_digest, root_key
from silva.types.errors import RequestError
from silva.types.messages import Message, ToolCall
from silva.wire.content import Content
from silva.wire.history import HistoryCache
from silva.wire.responses_format import ResponsesFormat

USER = {"role": "user", "content": "hi"}
REASONING = {"type": "reasoning", "id": "rs_x", "summary": [{"type": "summary_text", "text": "hm"}]}
SAID = {
    "type": "message",
    "role": "assistant",
    "id": "msg_x",
    "content": [{"type": "output_text", "text": "let me", "annotations": []}],
}
CALL = {"type": "function_call", "id": "fc_x", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "42"}


BODIES = BodyReader(ResponsesFormat())
parse, refusal = BODIES.parse, BODIES.refusal


def read(items: Any, **fields: Any) -> tuple[Message, ...]:
    return messages_of(parse({"input": items, **fields}))


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ("text", "input[1]"),
        (None, "input[1]"),
        ({}, "input[1].role"),
        ({"role": "tool", "content": "x"}, "input[1].role"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "user", "content": 5}, "input[1].content"),
        ({"role": "user", "content": [{"type": "input_text", "text": 5}]}, "input[1].content[0].text"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}, "input[1].content[0]"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input[1].content[0]"),
        ({"type": "web_search_call", "id": "x"}, "input[1].type"),
        ({"type": 7}, "input[1].type"),
        ({"type": []}, "input[1].type"),
        ({**CALL, "call_id": None}, "input[1].call_id"),
        ({**CALL, "name": ""}, "input[1].name"),
        ({**RESULT, "call_id": 7}, "input[1].call_id"),
        ({**RESULT, "output": 7}, "input[1].output"),
        ({**RESULT, "output": [{"type": "input_image", "image_url": "data:x"}]}, "input[1].output[0]"),
        ({**REASONING, "summary": 7}, "input[1].summary"),
        ({**REASONING, "summary": [7]}, "input[1].summary[0]"),
        ({**REASONING, "summary": [], "content": [{}]}, "input[1].content[0]"),
        ({"type": "item_reference"}, "input[1].id"),
        ({"type": "item_reference", "id": "msg_never"}, "input[1].id"),
        ({"id": "msg_never"}, "input[1].id"),
    ],
)
def test_a_bad_item_is_refused_by_its_path(item: Any, field: str):
    assert refusal({"input": [USER, item]}).field == field


def test_a_bad_item_inside_a_run_is_refused_by_its_own_path():
    assert refusal({"input": [USER, REASONING, SAID, {**CALL, "name": 3}]}).field == "input[3].name"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": {}}, "input"),
        ({"input": 7}, "input"),
        ({"instructions": 7}, "instructions"),
        ({"instructions": ["be brief"]}, "instructions"),
        ({"stream": "yes"}, "stream"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "x"}, "max_output_tokens"),
    ],
)
def test_a_bad_field_is_refused_by_its_name(fields: dict[str, Any], field: str):
    assert refusal({"input": "hi", **fields}).field == field


def test_an_image_in_an_answer_is_refused_with_a_sentence():
    body = {"input": [USER, {"role": "assistant", "content": [{"type": "input_image", "image_url": "data:x"}]}]}
    assert "only user, tool and system messages may contain images" in str(refusal(body))


def test_a_request_without_input_says_what_is_missing():
    assert refusal({"instructions": "be brief"}).field == "input"


def test_strings_items_roles_and_parts_are_projected():
    hi = Message(role="user", content="hi")
    assert read("hi") == read([USER]) == read([{**USER, "type": "message"}]) == (hi,)
    assert read([{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]) == (hi,)
    assert read("hi", instructions="be brief") == (Message(role="system", content="be brief"), hi)
    assert read("hi", instructions=None) == read("hi", instructions="") == (hi,)
    system = Message(role="system", content="x")
    assert read([{"role": "developer", "content": "x"}, {"role": "system", "content": "x"}]) == (system, system)


def test_what_the_assistant_said_in_a_row_is_one_message():
    second = {**CALL, "call_id": "c2", "arguments": "{broken"}
    assert read([USER, REASONING, SAID, CALL, second, RESULT, {**RESULT, "call_id": "c2", "output": ""}, USER])[
        1:4
    ] == (
        Message(
            role="assistant",
            content="let me",
            reasoning="hm",
            tool_calls=(
                ToolCall(id="c1", name="f", arguments='{"a": 1}'),
                ToolCall(id="c2", name="f", arguments="{broken"),
            ),
        ),
        Message(role="tool", content="42", tool_call_id="c1"),
        Message(role="tool", content="(no output)", tool_call_id="c2"),
    )
    assert [message.role for message in read([USER, SAID, USER, CALL, RESULT, SAID])] == [
        "user", "assistant", "user", "assistant", "tool", "assistant",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"summary": [{"type": "summary_text", "text": "R"}], "content": None, "encrypted_content": "zzz"}, "R"),
        ({"summary": [], "content": [{"type": "reasoning_text", "text": "R"}]}, "R"),
        ({"content": [{"type": "reasoning_text", "text": "R"}]}, "R"),
        ({"summary": [{"text": "R"}, {"text": "S"}], "content": [{"text": "other"}]}, "RS"),
        ({"summary": [], "encrypted_content": "zzz"}, ""),
    ],
)
def test_readable_reasoning_is_found_wherever_it_stands(item: dict[str, Any], text: str):
    said = read([USER, {"type": "reasoning", **item}, SAID])[1]
    assert (said.reasoning, said.content) == (text, "let me")


@pytest.mark.parametrize("output", ["", None, [], [{"type": "input_text", "text": ""}]])
def test_an_empty_result_has_a_text(output: Any):
    assert read([USER, CALL, {**RESULT, "output": output}])[2].content == "(no output)"


def test_results_come_as_text_blocks_too():
    parts = [{"type": "input_text", "text": "4"}, {"type": "output_text", "text": "2"}]
    assert read([USER, CALL, {**RESULT, "output": parts}]) == read([USER, CALL, RESULT])


def test_nulls_and_unknown_keys_of_an_item_mean_nothing():
    nulls = {"status": None, "namespace": None, "phase": None, "frobnicate": {"a": [1]}}
    plain = parse({"input": [USER, REASONING, SAID, CALL, RESULT]})
    noisy = parse({"input": [{**item, **nulls} for item in (USER, REASONING, SAID, CALL, RESULT)]})
    assert plain.digests == noisy.digests


def test_options_are_read_and_the_rest_is_counted():
    request = parse(
        {
            "model": "gpt-x", "input": "hi", "max_output_tokens": 7.0, "stream": True, "previous_response_id": "resp_1",
            "temperature": "hot", "top_p": [], "tool_choice": {"type": "function"}, "store": False, "zeta": 1,
            "tools": [{"type": "web_search"}],
        }
    )  # fmt: skip
    options = request.options
    assert (options.model, options.max_tokens, options.stream) == ("gpt-x", 7, True)
    assert options.ignored_fields == (
        "previous_response_id", "store", "temperature", "tool_choice", "top_p", "zeta", "tools[0]:web_search",
    )  # fmt: skip


def test_flat_tools_become_nested_ones_and_namespaces_are_opened():
    parameters = {"type": "object", "properties": {}}
    flat = {"type": "function", "strict": True, "parameters": parameters, "name": "f", "description": "d"}
    request = parse({"input": "hi", "tools": [{"type": "namespace", "name": "n", "tools": [flat]}, {"type": "mcp"}]})
    nested = {"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}
    assert json.dumps(request.conversation.tools) == json.dumps([nested])
    assert request.options.ignored_fields == ("tools[1]:mcp",)


def test_template_arguments_select_the_conversation():
    asked = parse({"input": "hi", "chat_template_kwargs": {"enable_thinking": False}})
    assert asked.conversation.template_kwargs == {"enable_thinking": False}
    assert root_key(asked.conversation) != root_key(parse({"input": "hi"}).conversation)


def test_errors_name_the_item_that_a_message_began_with():
    request = parse({"instructions": "be", "input": [USER, REASONING, SAID, RESULT, USER]})
    places = [request.path_of(index) for index in range(len(request.digests))]
    assert places == ["instructions", "input[0]", "input[1]", "input[3]", "input[4]"]
    assert parse({"input": "hi"}).path_of(0) == "input"


def test_an_unchanged_history_is_not_read_again(monkeypatch: pytest.MonkeyPatch):
    from silva.wire import responses_input

    built: list[str] = []

    def counting(role: Any, content: Content, at: str) -> Message:
        built.append(at)
        return Message(role=role, content=content.text)

    monkeypatch.setattr(responses_input, "input_message", counting)
    history = HistoryCache()
    items: list[Any] = []
    for number in range(100):
        items += [{"role": "user", "content": f"{number} " + "x" * number}, REASONING, SAID]
    first = parse({"input": items}, history)
    assert len(built) == 100
    second = parse({"input": [*items, USER]}, history)
    assert built[100:] == ["input[300].content"]
    assert second.digests[:200] == first.digests
    assert second.digests == [message_digest(message) for message in messages_of(second)]


def test_a_run_is_known_by_all_of_its_items():
    history = HistoryCache()
    first = parse({"input": [USER, REASONING, SAID]}, history)
    longer = parse({"input": [USER, REASONING, SAID, CALL]}, history)
    other = parse({"input": [USER, SAID, REASONING]}, history)
    alone = parse({"input": [USER, SAID]}, history)
    assert len({request.digests[1] for request in (first, longer, alone)}) == 3
    assert other.digests == first.digests
    assert longer.digests == parse({"input": [USER, REASONING, SAID, CALL]}).digests


def test_the_same_text_as_instructions_and_as_input_stays_apart():
    history = HistoryCache()
    assert [message.role for message in messages_of(parse({"input": "x", "instructions": "x"}, history))] == [
        "system",
        "user",
    ]
    again = parse({"input": "x", "instructions": "x"}, history)
    assert [message_digest(message) for message in messages_of(again)] == again.digests


def test_given_items_are_kept_within_bounds():
    history = HistoryCache(max_items=8)
    for number in range(100):
        history.keep_item(f"msg_{number}", Message(role="assistant", content=str(number)))
    assert history.item("msg_99") == Message(role="assistant", content="99")
    assert refusal({"input": [USER, {"type": "item_reference", "id": "msg_0"}]}, history).code == "unknown_item"


PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["input_text", "output_text", "summary_text"]), "text": st.text(max_size=8) | JSON}
    ),
    max_size=2,
)
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            ["message", "reasoning", "function_call", "function_call_output", "item_reference", "web_search_call"]
        )
        | JSON,
        "role": st.sampled_from(["user", "system", "assistant", "developer"]) | JSON,
        "content": st.text(max_size=12) | PARTS | JSON,
        "summary": PARTS | JSON,
        "id": st.sampled_from(["msg_known", "msg_x"]) | JSON,
        "call_id": st.text(max_size=4) | JSON,
        "name": st.text(max_size=4) | JSON,
        "arguments": st.text(max_size=8) | JSON,
        "output": st.text(max_size=8) | PARTS | JSON,
    },
)
GOOD = st.sampled_from([USER, REASONING, SAID, CALL, RESULT, {"id": "msg_known"}])
BODY = st.fixed_dictionaries(
    {"input": st.lists(GOOD | ITEM, max_size=6) | st.text(max_size=5) | JSON},
    optional={
        name: JSON
        for name in (
            "instructions", "tools", "stream", "max_output_tokens", "chat_template_kwargs", "model", "tool_choice",
            "parallel_tool_calls", "previous_response_id",
        )
    },
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(BODY)
def test_any_json_is_read_or_refused_with_its_place(body: dict[str, Any]):
    history = HistoryCache()
    history.keep_item("msg_known", Message(role="assistant", content="known"))
    try:
        request = parse(body, history)
    except RequestError as error:
        assert 400 <= error.status < 500 and str(error)
        return
    messages = messages_of(request)
    assert [message_digest(message) for message in messages] == request.digests
    roles = [message.role for message in messages]
    assert ("assistant", "assistant") not in pairwise(roles)
    root_key(request.conversation)
    assert parse(body, history).digests == request.digests


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([USER, REASONING, SAID, CALL, RESULT]), min_size=1, max_size=12), st.data())
def test_a_warm_cache_changes_nothing(items: list[Any], data: st.DataObject):
    history = HistoryCache(max_entries=4)
    for _ in range(3):
        parse({"input": items[: data.draw(st.integers(1, len(items)))]}, history)
    assert parse({"input": items}, history).digests == parse({"input": items}).digests


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_read(noise: bytes):
    for body in (noise, b'{"input":"' + noise + b'"}', b'{"input":[{"role":"user","content":"' + noise + b'"}]}'):
        try:
            messages_of(parse(body))
        except RequestError as error:
            assert 400 <= error.status < 500
