"""Field cases about the Messages protocol, through the real door."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest
from gateway_serve import Json, serving
from messages_client import CUT, ask, assembled, events, post, refused, sdk

from silva.codec import TurnCodec
from silva.wire.messages_input import ERROR_RESULT_MARK

HI: list[Json] = [{"role": "user", "content": "hi"}]
MORE: Json = {"role": "user", "content": "more"}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nplan\n</think>\n\nyes"
IMAGE: Json = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}


@pytest.mark.parametrize(
    ("line", "reason", "stop", "told"),
    [
        ({"text": "A B STOP C"}, "stop_sequence", "STOP", "A B "),
        ({"text": "A B HALT STOP"}, "stop_sequence", "HALT", "A B "),
        ({"text": "A B"}, "end_turn", None, "A B"),
        ({"text": "A B", **CUT}, "max_tokens", None, "A B"),
        ({"text": CALL}, "tool_use", None, None),
        ({"text": CALL + " STOP"}, "tool_use", None, None),
    ],
)
async def test_api_06_stop_reasons_are_told_in_json_and_stream(
    codec: TurnCodec, line: Json, reason: str, stop: str | None, told: str | None
):
    async with serving(codec, [line]) as serve:
        fields: Json = {"stop_sequences": ["STOP", "HALT"]}
        whole = await ask(serve, "plain", HI, **fields)
        streamed = assembled(events((await post(serve, "stream", HI, stream=True, **fields)).text))
        assert {**streamed, "id": whole["id"]} == whole
        assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stop)
        texts = [block["text"] for block in whole["content"] if block["type"] == "text"]
        assert told is None or texts == [told]
        for session in ("plain", "stream"):
            serve.sample(session)


async def test_api_06_a_turn_that_a_stop_sequence_ended_goes_on(codec: TurnCodec):
    async with serving(codec, [{"text": "A B STOP C"}, {"text": "ok"}]) as serve:
        first = await ask(serve, "s", HI, stop_sequences=["STOP"])
        answer = await post(serve, "s", [*HI, {"role": "assistant", "content": first["content"]}, MORE])
        assert answer.headers["x-silva-match"] == "append"
        assert serve.sample("s").num_turns == 2


@pytest.mark.slow
@pytest.mark.parametrize("signature", [None, "", "dummy", 7])
async def test_api_08_streamed_thinking_comes_back_with_any_signature(codec: TurnCodec, signature: Any):
    async with serving(codec, [{"text": THOUGHT}, {"text": "ok"}]) as serve:
        async with (
            sdk(serve, "s") as client,
            client.messages.stream(model="m", max_tokens=100, messages=[{"role": "user", "content": "hi"}]) as stream,
        ):
            kinds = [
                event.delta.type if event.type == "content_block_delta" else event.type
                async for event in stream
                if event.type.startswith("content_block") and getattr(event, "index", 0) == 0
            ]
            final = await stream.get_final_message()
        assert kinds == ["content_block_start", "thinking_delta", "signature_delta", "content_block_stop"]
        blocks = [block.model_dump(exclude_none=True) for block in final.content]
        assert [block["type"] for block in blocks] == ["thinking", "text"]
        assert blocks[0]["thinking"] == "plan" and blocks[0]["signature"]
        if signature is not None:
            blocks[0]["signature"] = signature
        blocks.insert(0, {"type": "redacted_thinking", "data": "xyz"})
        answer = await post(serve, "s", [*HI, {"role": "assistant", "content": blocks}, MORE])
        assert answer.headers["x-silva-match"] == "append"
        assert serve.session("s").requests[1].ignored_fields == ["messages[1].content[0]:redacted_thinking"]
        assert serve.sample("s").num_turns == 2


def tool_history(*results: Json) -> list[Json]:
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    return [*HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": list(results)}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("boom", "boom"),
        ([{"type": "text", "text": "bo"}, {"type": "text", "text": "om"}], "boom"),
        ("", "(no output)"),
        ([], "(no output)"),
        (None, "(no output)"),
        ([{"type": "text", "text": ""}], "(no output)"),
    ],
)
@pytest.mark.parametrize("failed", [None, False, True])
async def test_api_10_every_form_of_a_tool_result_is_shown(
    codec: TurnCodec, content: Any, shown: str, failed: bool | None
):
    block: Json = {"type": "tool_result", "tool_use_id": "t1", "content": content}
    if content is None:
        del block["content"]
    if failed is not None:
        block["is_error"] = failed
    async with serving(codec, [{"text": "ok"}]) as serve:
        await ask(serve, "s", tool_history(block, {"type": "text", "text": "and now?"}))
        seen = codec.decode(serve.calls("s")[0]["input_ids"])
        mark = ERROR_RESULT_MARK if failed else ""
        assert f"<tool_response>\n{mark}{shown}\n</tool_response>" in seen
        assert seen.index(shown) < seen.index("and now?")
        (*_, result, question) = serve.forest("s").nodes[1].messages
        assert (result.role, result.tool_call_id, result.content) == ("tool", "t1", mark + shown)
        assert (question.role, question.content) == ("user", "and now?")


async def test_api_10_an_image_in_a_failed_result_reaches_the_engine(codec: TurnCodec):
    boom = {"type": "text", "text": "boom"}
    failed = {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": [boom, IMAGE, boom]}
    digest = hashlib.sha256(base64.b64decode(IMAGE["source"]["data"])).hexdigest()
    async with serving(codec, [{"text": "ok"}]) as serve:
        await ask(serve, "s", tool_history(failed, {"type": "text", "text": "and now?"}))
        (call,) = serve.calls("s")
        seen = codec.decode(call["input_ids"])
        assert f"<tool_response>\n{ERROR_RESULT_MARK}boom<image>boom\n</tool_response>" in seen
        assert seen.index("<image>") < seen.index("and now?")
        assert call["images"] == [digest]
        assert IMAGE["source"]["data"] not in seen
        (*_, result, _) = serve.forest("s").nodes[1].messages
        assert result.to_chat()["content"] == [
            {"type": "text", "text": ERROR_RESULT_MARK + "boom"},
            {"type": "image_url", "image_url": {"url": "media:sha256:" + digest}},
            boom,
        ]
        assert serve.sample("s").images == ("media:sha256:" + digest,)


async def test_api_10_a_block_that_cannot_be_shown_is_refused_by_its_path(codec: TurnCodec):
    document = {"type": "document", "source": {}}
    failed = {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": [IMAGE, document]}
    async with serving(codec, [{"text": "ok"}]) as serve:
        assert "messages[2].content[0].content[1]" in await refused(serve, "s", tool_history(failed))
        said = {"role": "assistant", "content": [{"type": "text", "text": "here"}, IMAGE]}
        message = await refused(serve, "s", [*HI, said, MORE])
        assert "messages[1].content[1] is an image; only user" in message
        assert serve.calls() == []
