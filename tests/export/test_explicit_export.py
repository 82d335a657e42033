"""Explicit export: what an agent writes down of a session finds the state that was committed, or is told why not."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from gateway_serve import Json, Serve, serving
from messages_client import sdk as anthropic_sdk
from pictures import chat_part, data_uri, png

from silva.codec import TurnCodec
from silva.export.exporter import Exporter
from silva.export.options import ExportOptions
from silva.types.errors import SessionFailure
from silva.types.rollout import ExportRecord

TOOLS: list[Json] = [
    {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
]
CALL = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>'
SCRIPT: list[Json] = [{"text": CALL}, {"text": "<think>\nso\n</think>\n\nfound"}, {"text": "more"}]
SYSTEM: Json = {"role": "system", "content": "be brief"}
USER: Json = {"role": "user", "content": "hi"}


def export(serve: Serve, session_id: str, *records: Json, **options: Any) -> list[ExportRecord]:
    output = "".join(json.dumps(record) + "\n" for record in records).encode()
    exporter = Exporter(ExportOptions(**options))
    return exporter.records(serve.forest(session_id), output, "train", f"session {session_id}")


def refused(serve: Serve, session_id: str, record: Json, **options: Any) -> str:
    with pytest.raises(SessionFailure) as caught:
        export(serve, session_id, {"name": "main", **record}, **options)
    assert caught.value.reason == "record_unmatched"
    text = str(caught.value)
    assert text.startswith("record 'main' (line 1 of the output file) matches no committed state: ")
    return text


async def talk(serve: Serve, session_id: str) -> list[Json]:
    """Two turns with a tool call between them; the whole history as a Chat client has it."""
    history = [SYSTEM, USER]
    message = await serve.message(session_id, history, tools=TOOLS)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "it is 7"}
    history += [message, result]
    return [*history, await serve.message(session_id, history, tools=TOOLS)]


def ids(records: Sequence[ExportRecord]) -> list[int]:
    return [record.node_id for record in records]


async def test_every_committed_state_can_be_exported_and_only_those(codec: TurnCodec, caplog: pytest.LogCaptureFixture):
    async with serving(codec, SCRIPT) as serve:
        history = await talk(serve, "s")
        first, second = serve.responses("s")
        assert second.parent is not None
        records = [{"name": f"r{end}", "messages": history[:end], "tools": TOOLS} for end in (3, 4, 5)]
        found = export(serve, "s", *records)
        assert ids(found) == [first.node_id, second.parent.node_id, second.node_id]
        assert [record.name for record in found] == ["r3", "r4", "r5"]
        ends = [f"record 'r4' (line 2 of the output file) ends with a request (observation {second.parent.node_id})"]
        assert [text for text in caplog.messages if ends[0] in text and "append that answer" in text]
        again = {"name": "again", "messages": history[:4], "tools": TOOLS}
        output, exporter = (json.dumps(records[1]) + "\n" + json.dumps(again) + "\n").encode(), Exporter()
        caplog.clear()
        for session_id in ("s", "other"):
            exporter.records(serve.forest("s"), output, "train", session_id)
        assert exporter.counters["unanswered_end"] == 4 and caplog.text.count("append that answer") == 1

        text = refused(serve, "s", {"messages": history[:2], "tools": TOOLS})
        assert "it ends with messages[1], before any answer of the model (observation 1 (request " in text
        text = refused(serve, "s", {"messages": history[:1], "tools": TOOLS})
        assert "it ends with messages[0], in the middle of what one request brought" in text
        assert "end the record with messages[1], or with an answer to it" in text
        sent = {"role": "user", "content": "never sent"}
        text = refused(serve, "s", {"messages": [*history, sent], "tools": TOOLS})
        assert "/messages/5 is not in the session's history: absent there, {" in text and "never sent" in text
        assert f"the record may end with messages[4] (response {second.node_id} (request {second.request_id}))" in text
        text = refused(serve, "s", {"messages": [*history[:3], sent], "tools": TOOLS})
        assert '/messages/3/role differs: "tool" in observation 3' in text and '"user" in the record' in text
        assert f"The nearest committed state is response {first.node_id}" in text
        assert "which ends with messages[2]. messages must be those of the requests" in text


async def test_what_differs_is_named_with_both_values_and_what_to_do(codec: TurnCodec):
    async with serving(codec, SCRIPT) as serve:
        history = await talk(serve, "s")
        edited = [*history[:4], {**history[4], "content": "found it"}]
        text = refused(serve, "s", {"messages": edited, "tools": TOOLS})
        assert '/messages/4/content differs: "found" in response 4 (request ' in text and '"found it" in the' in text
        assert "Keep assistant messages as the model gave them: text, reasoning_content and tool calls" in text
        text = refused(serve, "s", {"messages": [USER, *history[2:]], "tools": TOOLS, "system": "be brief"})
        assert '/messages/0/role differs: "system" in observation 1' in text
        assert "Not one committed state is shared" in text
        assert "The record's key `system` means nothing: such a text belongs into `messages`" in text

        text = refused(serve, "s", {"messages": history})
        assert "/tools/0 differs: {" in text and "absent in the record" in text
        assert "copy the `tools` of the requests into the record" in text
        other = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "description": "other"}}]
        text = refused(serve, "s", {"messages": history, "tools": other})
        assert '/tools/0/function/description differs: "d" there, "other" in the record' in text
        flat = [{"name": "look", "description": "d", "input_schema": {"type": "object"}}]
        text = refused(serve, "s", {"messages": history, "tools": flat})
        assert "those that are no nested function tools mean nothing: tools[0]:unknown" in text
        kwargs = {"enable_thinking": False}
        text = refused(serve, "s", {"messages": history, "tools": TOOLS, "chat_template_kwargs": kwargs})
        assert "/chat_template_kwargs/enable_thinking differs: absent there, false in the record" in text
        assert "the requests had no chat_template_kwargs: leave them out of the record" in text


async def test_a_record_under_other_tools_is_told_of_them_where_that_is_all(codec: TurnCodec):
    """The session knows the record's tools as well, from a call about something else."""
    async with serving(codec, SCRIPT) as serve:
        history = await talk(serve, "s")
        await serve.message("s", [{"role": "user", "content": "a title, please"}])
        assert "/tools/0 differs" in refused(serve, "s", {"messages": history})
        assert "/messages/4/content differs" in refused(
            serve, "s", {"messages": [*history[:4], {**history[4], "content": "x"}], "tools": TOOLS}
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"messages": [USER, {"type": "function_call", "name": "look"}]}, "input item of the Responses API"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use"}]}]}, "of the Anthropic Messages"),
        ({"messages": [USER, {"role": "robot", "content": "x"}]}, "messages[1].role is 'robot'; it must be one of"),
        ({"messages": [USER, 5]}, "messages[1] must be an object"),
        ({"messages": [USER], "tools": 5}, "tools is 5; it must be a list"),
        ({"messages": [USER], "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize is set by"),
        ({"messages": [{"role": "user", "content": [chat_part("file:///x.png")]}]}, "messages[0].content[0]"),
    ],
)
async def test_messages_that_no_request_could_hold(codec: TurnCodec, record: Json, text: str):
    async with serving(codec, SCRIPT) as serve:
        await talk(serve, "s")
        with pytest.raises(SessionFailure) as caught:
            export(serve, "s", {"name": "ok", "messages": [USER]}, {"name": "main", **record})
        assert caught.value.reason in ("record_invalid", "record_unmatched")
        with pytest.raises(SessionFailure) as caught:
            export(serve, "s", {"name": "main", **record})
        assert caught.value.reason == "record_invalid"
        assert str(caught.value).startswith("record 'main' (line 1 of the output file) cannot be used: ")
        assert text in str(caught.value)


async def test_a_session_without_an_answer_has_nothing_to_match(codec: TurnCodec):
    async with serving(codec, SCRIPT) as serve:
        serve.opened["s"] = serve.registry.open("s", "g", "train")
        with pytest.raises(SessionFailure, match=r"record 'main' \(line 1 .* without an answer of the model") as caught:
            export(serve, "s", {"name": "main", "messages": [USER]})
        assert caught.value.reason == "no_response"


async def test_lossy_records_are_the_turns_that_they_were(codec: TurnCodec):
    async with serving(codec, SCRIPT, agentic_echo_match="lenient") as serve:
        history = await talk(serve, "s")
        call = {**history[2]["tool_calls"][0], "id": "mine"}
        lossy = [
            *history[:2],
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {**history[3], "tool_call_id": "mine"},
            {"role": "assistant", "content": " found\n"},
        ]
        record = {"name": "main", "messages": lossy, "tools": TOOLS}
        assert ids(export(serve, "s", record)) == [serve.responses("s")[-1].node_id]
        text = refused(serve, "s", {**record, "messages": lossy}, agentic_echo_match="exact")
        assert '/messages/2/reasoning_content differs: "hm" in response 2' in text
        wrong = [*lossy[:3], {**lossy[3], "tool_call_id": "theirs"}, lossy[4]]
        assert "/messages/3/tool_call_id differs" in refused(serve, "s", {**record, "messages": wrong})


@pytest.mark.parametrize("lenient", [True, False])
async def test_the_part_that_went_on_with_a_cut_turn_may_be_all_that_it_says(codec: TurnCodec, lenient: bool):
    """The first part is the opening of the reasoning alone: the second has the words of the whole turn."""
    script = [{"text": "<think>\nhm"}, {"text": "so\n</think>\n\nfound"}]
    async with serving(codec, script, agentic_echo_match="lenient" if lenient else "exact") as serve:
        cut = await serve.message("s", [USER], max_tokens=1)
        rest = await serve.message("s", [USER, cut])
        assert (cut["content"], rest["content"], rest["reasoning_content"]) == ("", "found", "so")
        part, whole = serve.responses("s")
        records = [{"name": f"r{end}", "messages": [USER, cut, rest][:end]} for end in (2, 3)]
        mode = "lenient" if lenient else "exact"
        assert ids(export(serve, "s", *records, agentic_echo_match=mode)) == [
            part.node_id,
            whole.node_id,
        ]


async def test_contexts_may_not_be_more_than_memory_holds(codec: TurnCodec, monkeypatch: pytest.MonkeyPatch):
    async with serving(codec, SCRIPT) as serve:
        history = await talk(serve, "s")
        records = [{"name": f"r{at}", "messages": history, "tools": TOOLS} for at in range(3)]
        num = 3 * serve.responses("s")[-1].num_tokens
        monkeypatch.setattr("silva.export.exporter.MAX_CONTEXT_TOKENS", num)
        assert len(export(serve, "s", *records)) == 3
        monkeypatch.setattr("silva.export.exporter.MAX_CONTEXT_TOKENS", num - 1)
        with pytest.raises(SessionFailure, match=f"session s exports 3 contexts of {num} tokens together") as caught:
            export(serve, "s", *records)
        assert caught.value.reason == "contexts_too_large"


async def test_noise_in_the_system_prompt_makes_no_other_record(codec: TurnCodec):
    def billed(nonce: str) -> Json:
        return {"role": "system", "content": f"x-anthropic-billing-header: cc_version=2; cch={nonce};be brief"}

    async with serving(codec, [{"text": "a"}, {"text": "b"}]) as serve:
        message = await serve.message("s", [billed("11"), USER])
        history = [billed("22"), USER, message, {"role": "user", "content": "on"}]
        record = {"name": "main", "messages": [billed("33"), *history[1:], await serve.message("s", history)]}
        assert ids(export(serve, "s", record)) == [serve.responses("s")[-1].node_id]
        text = refused(serve, "s", record, agentic_profiles=["none"])
        assert "/messages/0/content differs" in text and "cch=11" in text and "cch=33" in text


async def test_each_turn_of_a_rerendered_session_is_a_record(codec: TurnCodec):
    """Under rerender each request starts anew: what the record has besides what the client sent back is forgiven."""
    async with serving(codec, SCRIPT, agentic_codec="rerender", agentic_echo_match="lenient") as serve:
        message = await serve.message("s", [SYSTEM, USER], tools=TOOLS)
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "it is 7"}
        sent = [SYSTEM, USER, {key: message[key] for key in ("role", "content", "tool_calls")}, result]
        last = await serve.message("s", sent, tools=TOOLS)
        for history in ([*sent, last], [SYSTEM, USER, message, result, last]):
            first = {"name": "first", "messages": history[:3], "tools": TOOLS}
            both = export(serve, "s", first, {"name": "second", "messages": history, "tools": TOOLS})
            assert ids(both) == [node.node_id for node in serve.responses("s")]
        text = refused(serve, "s", {"messages": sent, "tools": TOOLS})
        assert "before any answer of the model" in text


async def test_images_count_by_what_they_show(codec: TurnCodec):
    def ask(data: bytes) -> list[Json]:
        return [{"role": "user", "content": [chat_part(data_uri(data)), {"type": "text", "text": "what is it?"}]}]

    async with serving(codec, [{"text": "a cat"}]) as serve:
        answer = await serve.message("s", ask(png(mark=1)))
        (node,) = serve.responses("s")
        assert ids(export(serve, "s", {"name": "main", "messages": [*ask(png(mark=1)), answer]})) == [node.node_id]
        text = refused(serve, "s", {"messages": [*ask(png(mark=2)), answer]})
        assert "/messages/0/content/0/image_url/url differs" in text and text.count("media:sha256:") == 2


async def test_a_responses_client_exports_chat_messages(codec: TurnCodec):
    async with serving(codec, SCRIPT) as serve, serve.sdk("s") as client:
        tools: Any = [{"type": "function", **TOOLS[0]["function"]}]
        items: list[Any] = [{"role": "user", "content": "hi"}]
        more: Any = {"model": "m", "instructions": "be brief", "tools": tools}
        reply = await client.responses.create(input=items, **more)
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        call = next(item for item in reply.output if item.type == "function_call")
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "it is 7"})
        last = await client.responses.create(input=items, **more)
        function = {"name": call.name, "arguments": call.arguments}
        history = [
            SYSTEM,
            USER,
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": "it is 7"},
            {"role": "assistant", "content": last.output_text, "reasoning_content": "so"},
        ]
        record = {"name": "main", "messages": history, "tools": TOOLS}
        assert ids(export(serve, "s", record, agentic_echo_match="exact")) == [serve.responses("s")[-1].node_id]
        with pytest.raises(
            SessionFailure, match=r"messages\[1\]\.role.*input item of the Responses API \('reasoning'\)"
        ):
            export(serve, "s", {"name": "main", "messages": [*items], "tools": TOOLS})


async def test_a_messages_client_exports_chat_messages(codec: TurnCodec):
    async with serving(codec, SCRIPT) as serve, anthropic_sdk(serve, "s") as client:
        function = TOOLS[0]["function"]
        tools: Any = [{"name": "look", "description": "d", "input_schema": function["parameters"]}]
        history: list[Any] = [{"role": "user", "content": "hi"}]
        more: Any = {"model": "m", "max_tokens": 512, "system": "be brief", "tools": tools}
        reply = await client.messages.create(messages=history, **more)
        use = next(block for block in reply.content if block.type == "tool_use")
        blocks = [block.model_dump() for block in reply.content]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "it is 7"}
        history += [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
        last = await client.messages.create(messages=history, **more)
        said = [block for block in last.content if block.type == "text"]
        chat = [
            SYSTEM,
            USER,
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": use.id, "type": "function", "function": {"name": "look", "arguments": json.dumps(use.input)}}
                ],
            },
            {"role": "tool", "tool_call_id": use.id, "content": "it is 7"},
            {"role": "assistant", "content": said[0].text, "reasoning_content": "so"},
        ]
        record = {"name": "main", "messages": chat, "tools": TOOLS}
        assert ids(export(serve, "s", record, agentic_echo_match="exact")) == [serve.responses("s")[-1].node_id]
        with pytest.raises(SessionFailure, match=r"messages\[1\]\.content\[0\].*blocks of the Anthropic Messages API"):
            export(serve, "s", {"name": "main", "messages": history, "tools": TOOLS})


async def test_answers_with_the_same_words_are_told_apart_by_what_is_left(
    codec: TurnCodec, caplog: pytest.LogCaptureFixture
):
    """Best of three, the same each time: every record gets an answer of its own, those that were used go first."""
    async with serving(codec, [{"text": "a"}, {"text": "a"}, {"text": "a"}, {"text": "b"}]) as serve:
        answers = [await serve.message("s", [USER]) for _ in range(3)]
        await serve.message("s", [USER, answers[0], {"role": "user", "content": "on"}])
        one, two, used, _ = serve.responses("s")
        assert used.children and not one.children  # the newest of equals goes on
        exporter = Exporter()

        def chosen(num: int) -> list[int]:
            lines = [{"name": f"r{at}", "messages": [USER, answers[0]]} for at in range(num)]
            data = "\n".join(map(json.dumps, lines)).encode()
            return ids(exporter.records(serve.forest("s"), data, "train", "session s"))

        with caplog.at_level(logging.WARNING, "silva.rollout"):
            assert chosen(1) == [used.node_id]
        assert (
            f"session s: record 'r0' (line 1 of the output file) fits 3 states: taken is response {used.node_id}"
            in (caplog.text)
        )
        assert exporter.counters == {"ambiguous": 1}
        assert chosen(3) == [used.node_id, two.node_id, one.node_id]
        assert chosen(4) == [used.node_id, two.node_id, one.node_id, used.node_id]
        assert exporter.counters["same_state"] == 1


async def test_rewards_and_metadata_go_with_their_record(codec: TurnCodec):
    async with serving(codec, SCRIPT) as serve:
        history = await talk(serve, "s")
        records: list[Json] = [
            {
                "name": "main",
                "messages": history,
                "tools": TOOLS,
                "reward": {"score": 0.5, "n": 3, "ok": True, "x": "y"},
            },
            {"name": "side", "messages": history[:3], "tools": TOOLS, "metadata": {"role": "side"}, "color": 1},
            {"name": "other", "messages": history[:4], "tools": TOOLS, "reward": -1},
        ]
        main, side, other = export(serve, "s", *records, reward_key="score")
        assert (main.reward, main.helpers, main.metadata) == (0.5, {"n": 3.0, "ok": 1.0}, {})
        assert (side.reward, side.helpers, side.metadata) == (None, {}, {"role": "side"})
        assert (other.reward, other.helpers) == (-1.0, {})
        with pytest.raises(SessionFailure, match=r"session s, record 'main' \(line 1 .*--reward-key") as caught:
            export(serve, "s", *records)
        assert caught.value.reason == "reward_invalid"

        keys = Exporter(ExportOptions(reward_key="a", eval_reward_key="b"))
        data = b'{"reward": {"a": 1, "b": 2}}'
        rewards = [keys.records(serve.forest("s"), data, mode, "s")[0].reward for mode in ("train", "eval")]
        assert rewards == [1.0, 2.0]
