"""Images through the real door: each place for one in a request, and what the engine, the forest and the files hold."""

from __future__ import annotations

import base64
import errno
import os
from pathlib import Path
from typing import Any

import messages_client
import pytest
from chatml_dir import build_chatml_dir, chat_template
from gateway_serve import Json, Serve, serving
from pictures import chat_part, data_uri, digest, messages_block, png, text
from transformers import PreTrainedTokenizerFast

from silva.codec import TurnCodec
from silva.inference.scripted import ScriptedEngine
from silva.wire import images
from silva.wire.images import MAX_IMAGE_BYTES, MAX_URL_CHARS

ONE, TWO = png(mark=1), png(mark=2)
HI: list[Json] = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
WEB = "https://example.org/a.png?x=1"
IMAGE_TOKEN = "<|image|>"


def user(*parts: Json) -> Json:
    return {"role": "user", "content": list(parts)}


def seen(serve: Serve, call: int = -1) -> str:
    return serve.codec.decode(serve.calls()[call]["input_ids"])


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> TurnCodec:
    """A codec whose template has a place for images in user messages, and no other."""
    folder = build_chatml_dir(tmp_path_factory.mktemp("vision"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    parts = (
        "{%- for part in text -%}{%- if part.type == 'image_url' -%}{{- '<|image|>' -}}"
        "{%- elif part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}"
    )
    plain = "{{- '<|im_start|>' + role + '\\n' + text + '<|im_end|>\\n' -}}"
    listed = (
        "{%- if text is string or role != 'user' -%}" + plain + "{%- else -%}{{- '<|im_start|>user\\n' -}}" + parts
    ) + "{{- '<|im_end|>\\n' -}}{%- endif -%}"
    source = chat_template().replace(plain, listed)
    assert source != chat_template()
    tokenizer.chat_template = source
    return TurnCodec(tokenizer, stop_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")])


async def test_chat_takes_images_from_users_and_tools(codec: TurnCodec):
    async with serving(codec, [{"text": CALL}, {"text": "ok"}]) as serve:
        client: Any = serve.sdk("s").chat.completions
        question = user(text("see "), chat_part(data_uri(ONE)), text(" and "), chat_part(WEB), text("?"))
        said = (await client.create(model="m", messages=[question])).choices[0].message
        assert "see <image> and <image>?" in seen(serve)
        result = {
            "role": "tool",
            "tool_call_id": said.tool_calls[0].id,
            "content": [{"type": "image_url", "image_url": data_uri(TWO)}, text("done")],
        }
        system: Json = {"role": "system", "content": [chat_part(data_uri(TWO))]}
        await client.create(model="m", messages=[question, said.model_dump(), result, system])
        assert "<tool_response>\n<image>done\n</tool_response>" in seen(serve)
        first, second = serve.calls("s")
        held = serve.forest("s").nodes[-1].path_images()
        assert [image.url for image in held] == [None, WEB, None, None]
        assert first["images"] == [digest(ONE), digest(WEB.encode())]
        assert second["images"] == [*first["images"], digest(TWO), digest(TWO)]
        assert {path.name: path.read_bytes() for path in serve.media_dir.iterdir()} == {
            digest(ONE): ONE,
            digest(TWO): TWO,
        }
        assert serve.sample("s").images == (
            "media:sha256:" + digest(ONE),
            WEB,
            *["media:sha256:" + digest(TWO)] * 2,
        )


async def test_responses_takes_images_from_users_and_calls(codec: TurnCodec):
    async with serving(codec, [{"text": CALL}, {"text": "ok"}]) as serve:
        client = serve.sdk("s").responses
        picture = {"type": "input_image", "detail": "high", "image_url": data_uri(ONE)}
        items: list[Any] = [user({"type": "input_text", "text": "see "}, picture)]
        reply = await client.create(model="m", input=items)
        call = next(item for item in reply.output if item.type == "function_call")
        output = [{"type": "input_text", "text": "here "}, {**picture, "detail": "low", "image_url": WEB}]
        items += [call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": output}]
        await client.create(model="m", input=items)
        assert "user\nsee <image><|im_end|>" in seen(serve)
        assert "<tool_response>\nhere <image>\n</tool_response>" in seen(serve)
        assert serve.calls()[-1]["images"] == [digest(ONE), digest(WEB.encode())]
        assert serve.session("s").requests[1].match == "append"
        serve.sample("s")


async def test_messages_takes_images_from_users_and_results(codec: TurnCodec):
    async with serving(codec, [{"text": CALL}, {"text": "ok"}]) as serve, messages_client.sdk(serve, "s") as client:
        messages: list[Any] = [user(messages_block(ONE), text("see"))]
        said = await client.messages.create(model="m", max_tokens=99, messages=messages)
        web = {"type": "image", "source": {"type": "url", "url": WEB}, "cache_control": {"type": "ephemeral"}}
        use: Any = said.content[0]
        content = [text("a"), messages_block(TWO), text("b")]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": content}
        messages += [{"role": "assistant", "content": said.content}, user(result, web, text("now"))]
        counted = await client.messages.count_tokens(model="m", messages=messages)
        await client.messages.create(model="m", max_tokens=9, messages=messages)
        assert counted.input_tokens == len(serve.calls()[-1]["input_ids"])
        assert "user\n<image>see<|im_end|>" in seen(serve)
        assert "<tool_response>\na<image>b\n</tool_response>" in seen(serve)
        assert "user\n<image>now<|im_end|>" in seen(serve)
        assert serve.calls()[-1]["images"] == [digest(ONE), digest(TWO), digest(WEB.encode())]


async def test_the_three_protocols_give_one_state(codec: TurnCodec):
    bare = base64.b64encode(ONE).decode().rstrip("=")
    wrapped = "\n".join(bare[at : at + 20] for at in range(0, len(bare), 20))
    forms: list[tuple[str, Json]] = [
        ("/v1/chat/completions", {"messages": [user(text("a"), chat_part(data_uri(ONE)))]}),
        ("/v1/chat/completions", {"messages": [user(text("a"), chat_part("data:image/jpeg;base64," + wrapped))]}),
        ("/v1/chat/completions", {"messages": [user(text(""), text("a"), chat_part(f"DATA:;x=y;Base64,{bare}"))]}),
        ("/v1/chat/completions", {"messages": [user(text("a"), chat_part(f" data:image/png; base64,\n{bare} \n"))]}),
        ("/v1/responses", {"input": [user(text("a"), {"type": "input_image", "image_url": data_uri(ONE)})]}),
        ("/v1/messages", {"max_tokens": 9, "messages": [user(text("a"), messages_block(ONE, "image/gif"))]}),
    ]
    async with serving(codec, [{"text": "ok"}]) as serve:
        for path, body in forms:
            assert (await serve.post("s", body, path=path)).status_code == 200, (path, body)
        observations = [node for node in serve.forest("s").nodes if node.kind == "observation"]
        assert len(observations) == 1 and len(observations[0].children) == len(forms)
        assert [call["images"] for call in serve.calls("s")] == [[digest(ONE)]] * len(forms)


REFERENCE = "media:sha256:" + digest(ONE)
CHANGES: list[tuple[Json, str, Any, Any]] = [
    (
        user(text("a"), chat_part(data_uri(TWO)), text("b")),
        "/messages/0/content/1/image_url/url",
        REFERENCE,
        "media:sha256:" + digest(TWO),
    ),
    (user(text("a"), chat_part(data_uri(ONE)), text("c")), "/messages/0/content/2/text", "b", "c"),
    (user(text("a"), chat_part(data_uri(ONE))), "/messages/0/content/2", text("b"), None),
    (user(chat_part(WEB), text("ab")), "/messages/0/content/0", text("a"), chat_part(WEB)),
    ({"role": "user", "content": "ab"}, "/messages/0/content", [text("a"), chat_part(REFERENCE), text("b")], "ab"),
]


async def test_another_image_or_another_place_is_another_message(codec: TurnCodec):
    first = user(text("a"), chat_part(data_uri(ONE)), text("b"))
    async with serving(codec, [{"text": "ok"}]) as serve:
        for number, (changed, pointer, old, new) in enumerate(CHANGES):
            session = f"s{number}"
            said = await serve.message(session, [first])
            await serve.message(session, [changed, said, *HI])
            record = serve.session(session).requests[-1]
            assert (record.match, record.difference) == ("root", {"pointer": pointer, "old": old, "new": new})
            await serve.message(session, [first, said, *HI])
            assert serve.session(session).requests[-1].match == "append"


async def test_a_branch_and_a_resumed_attempt_bring_the_images_of_their_own_lineage(codec: TurnCodec):
    script = [{"text": "one"}, {"text": "two", "abort_after": 1}, {"text": "wo"}, {"text": "three"}]
    async with serving(codec, script) as serve:
        history = [user(chat_part(data_uri(ONE)))]
        history.append(await serve.message("s", history))
        await serve.message("s", [*history, user(text("x"), chat_part(data_uri(TWO)))])
        await serve.message("s", [*history, user(text("x"))])
        assert [call["images"] for call in serve.calls("s")] == [
            [digest(ONE)],
            [digest(ONE), digest(TWO)],
            [digest(ONE), digest(TWO)],
            [digest(ONE)],
        ]
        assert serve.session("s").requests[-1].match == "branch"


async def test_rerendered_turns_bring_all_images(codec: TurnCodec):
    async with serving(codec, [{"text": "ok"}], agentic_codec="rerender") as serve:
        history = [user(chat_part(data_uri(ONE)))]
        history += [await serve.message("s", history), user(chat_part(data_uri(TWO)))]
        await serve.message("s", history)
        assert serve.calls("s")[-1]["images"] == [digest(ONE), digest(TWO)]


async def test_an_engine_that_reads_text_only_gets_no_image(codec: TurnCodec, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ScriptedEngine, "image_support", "none")
    async with serving(codec, [{"text": "ok"}]) as serve:
        answer = await serve.post("s", {"messages": [*HI, user(text("a"), chat_part(data_uri(ONE)))]})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "messages[1].content[1]")
        assert error["code"] == "unsupported_content" and "reads text only" in error["message"]
        body = {"input": [user(text("a")), user({"type": "input_image", "image_url": WEB})]}
        answer = await serve.post("s", body, path="/v1/responses")
        assert answer.json()["error"]["param"] == "input[1].content[0]"
        assert "messages[0].content[0]" in await messages_client.refused(serve, "s", [user(messages_block(ONE))])
        path = "/v1/messages/count_tokens"
        await messages_client.refused(serve, "s", [user(messages_block(ONE))], path=path)
        assert serve.calls() == [] and not serve.media_dir.exists()
        await serve.chat("s", HI)


async def test_a_vision_engine_gets_images_where_the_template_has_a_place(
    vision: TurnCodec, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ScriptedEngine, "image_support", "placed")
    async with serving(vision, [{"text": CALL}, {"text": "ok"}]) as serve:
        question = user(text("see "), chat_part(data_uri(ONE)), text(f"not {IMAGE_TOKEN}"))
        said = await serve.message("s", [question])
        ids = serve.calls("s")[0]["input_ids"]
        assert f"user\nsee {IMAGE_TOKEN}not {IMAGE_TOKEN}<|im_end|>" in seen(serve)
        assert ids.count(vision.encode_sampled(IMAGE_TOKEN)[0]) == 1
        result: Json = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"]}
        answer = await serve.post("s", {"messages": [question, said, {**result, "content": [chat_part(WEB)]}]})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "messages[2].content[0]")
        assert "no place for images in tool messages" in error["message"]
        await serve.message("s", [question, said, {**result, "content": "none"}, user(chat_part(data_uri(TWO)))])
        assert serve.calls("s")[-1]["images"] == [digest(ONE), digest(TWO)]
        assert serve.calls("s")[-1]["input_ids"].count(vision.encode_sampled(IMAGE_TOKEN)[0]) == 2
        assert serve.sample("s").num_turns == 2


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"/>'
BAD: dict[str, Any] = {
    "bad base64": {"url": "data:image/png;base64,%%%"},
    "no base64": {"url": "data:image/png;base64,"},
    "cut base64": {"url": data_uri(ONE)[:-3] + "="},
    "not base64": {"url": "data:image/svg+xml,%3Csvg%3E"},
    "svg": {"url": data_uri(SVG, "image/svg+xml")},
    "text": {"url": data_uri(b"hello", "text/plain")},
    "picture as text": {"url": data_uri(ONE, "text/plain")},
    "file": {"url": "file:///etc/passwd"},
    "path": {"url": "/etc/passwd"},
    "reference": {"url": "media:sha256:" + digest(ONE)},
    "no host": {"url": "http:///x"},
    "blank inside": {"url": "https://a/ b"},
    "zero inside": {"url": "https://a/\0b"},
    "long": {"url": "https://a/" + "x" * MAX_URL_CHARS},
    "number": {"url": 7},
    "nothing": {},
    "null": None,
    "list": [],
}


async def test_a_full_disk_loses_no_run_and_a_file_that_was_taken_away_comes_back(
    codec: TurnCodec, monkeypatch: pytest.MonkeyPatch
):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with serving(codec, [{"text": "one"}, {"text": "two"}]) as serve:
        history = [user(chat_part(data_uri(ONE)), chat_part(data_uri(ONE)), chat_part(WEB))]
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", full)
            answer = await serve.post("s", {"messages": history})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_failed")
        assert str(serve.media_dir) in answer.text and os.strerror(errno.ENOSPC) in answer.text
        assert serve.forest("s").nodes == [] and list(serve.media_dir.iterdir()) == []
        again = await serve.post("s", {"messages": history}, x_stainless_retry_count="1")
        assert again.headers["x-silva-match"] == "root"
        (kept,) = serve.media_dir.iterdir()
        history += [{"role": "assistant", "content": "one"}, user(chat_part(data_uri(TWO)))]
        await serve.post("s", {"messages": history})
        files = {path: path.read_bytes() for path in serve.media_dir.iterdir()}
        assert kept in files and sorted(files.values()) == sorted([ONE, TWO])
        for path in files:
            path.unlink()
        history += [{"role": "assistant", "content": "two"}, *HI]
        more = await serve.post("s", {"messages": history})
        assert (more.status_code, more.headers["x-silva-match"]) == (200, "append")
        assert {path: path.read_bytes() for path in files} == files


async def test_what_is_no_image_is_refused_by_its_path(codec: TurnCodec):
    told = (400, "invalid_image", "messages[0].content[1]")
    async with serving(codec, [{"text": "ok"}]) as serve:
        for name, value in BAD.items():
            part = {"type": "image_url", "image_url": value}
            answer = await serve.post("s", {"messages": [user(text("a"), part)]})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == told, name
            assert len(error["message"]) < 300, name
        assert not serve.media_dir.exists()


@pytest.mark.parametrize(
    "source",
    [
        None,
        {},
        {"type": "file", "file_id": "f"},
        {"type": "base64"},
        {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(ONE).decode()},
        {"type": "url", "url": "ftp://a/b.png"},
    ],
)
async def test_what_is_no_source_is_refused_by_its_path(codec: TurnCodec, source: Any):
    async with serving(codec, [{"text": "ok"}]) as serve:
        message = await messages_client.refused(serve, "s", [user(text("a"), {"type": "image", "source": source})])
        assert "the image at messages[0].content[1] cannot be used: " in message


async def test_a_file_that_is_only_named_is_refused_by_the_field(codec: TurnCodec):
    async with serving(codec, [{"text": "ok"}]) as serve:
        body = {"input": [user({"type": "input_image", "file_id": "file-1"})]}
        answer = await serve.post("s", body, path="/v1/responses")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].content[0].file_id")


async def test_an_image_has_a_largest_size(codec: TurnCodec, monkeypatch: pytest.MonkeyPatch):
    async with serving(codec, [{"text": "ok"}]) as serve:
        await serve.chat("s", [user(chat_part(data_uri(png(MAX_IMAGE_BYTES))))])
        monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 1000)
        await serve.chat("s", [user(chat_part(data_uri(png(1000))))])
        answer = await serve.post("s", {"messages": [user(chat_part(data_uri(png(1001))))]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_image")
        assert sorted(path.stat().st_size for path in serve.media_dir.iterdir()) == [1000, MAX_IMAGE_BYTES]


async def test_a_thousand_images_are_taken_where_the_context_has_room(codec: TurnCodec):
    parts = [chat_part(data_uri(png(mark=mark % 10))) for mark in range(1000)]
    async with serving(codec, [{"text": "ok"}]) as serve:
        await serve.chat("s", [user(*parts)])
        assert len(serve.calls("s")[0]["images"]) == 1000
        assert len(list(serve.media_dir.iterdir())) == 10
    async with serving(codec, [{"text": "ok"}], engine_context_len=900) as serve:
        answer = await serve.post("s", {"messages": [user(*parts)]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert not serve.media_dir.exists()


async def test_a_refused_request_leaves_no_file(codec: TurnCodec, tmp_path: Path):
    async with serving(codec, [{"text": "ok"}]) as serve:
        broken = {"messages": [user(chat_part(data_uri(ONE))), {"role": "user", "content": ""}]}
        assert (await serve.post("s", broken)).status_code == 400
        assert not serve.media_dir.exists()
        mended = [user(chat_part(data_uri(ONE))), *HI]
        await serve.chat("s", mended)
        assert [path.read_bytes() for path in serve.media_dir.iterdir()] == [ONE]
