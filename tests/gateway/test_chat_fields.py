"""Fields of a Chat request whose effect shows in the tokens or in the answer."""

from __future__ import annotations

import pytest
from chatml_dir import build_chatml_dir
from gateway_serve import Json, serving

from silva.codec import TurnCodec

HI: list[Json] = [{"role": "user", "content": "hi"}]
TOOL: Json = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_those_of_the_sampled_tokens(codec: TurnCodec, stream: bool):
    ids = [*codec.encode_sampled("hello ü"), codec.end_of_turn_id()]
    values = [-0.25 * (n + 1) for n in range(len(ids))]
    async with serving(codec, [{"ids": ids, "append_eos": False, "logprobs": values}]) as serve:
        silent = await serve.chat("s", HI)
        assert silent["choices"][0]["logprobs"] is None
        assert (await serve.chat("s", HI, logprobs=False))["choices"][0]["logprobs"] is None
        if stream:
            parts = await serve.sdk("s").chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], logprobs=True, stream=True
            )
            (choice,) = [part.choices[0] async for part in parts]
        else:
            whole = await serve.sdk("s").chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], logprobs=True
            )
            (choice,) = whole.choices
        assert choice.logprobs is not None and choice.logprobs.content is not None
        entries = choice.logprobs.content
        assert [entry.logprob for entry in entries] == values
        texts = [codec.decode([token]) for token in ids[:-1]]
        assert [entry.token for entry in entries] == [*texts, ""]
        whole_characters = [entry for entry in entries if entry.bytes is not None]
        assert all(bytes(entry.bytes or ()).decode() == entry.token for entry in whole_characters)
        assert {entry.token for entry in entries if entry.bytes is None} == {text for text in texts if "\ufffd" in text}


async def test_template_arguments_reach_the_template_and_select_the_subtree(tmp_path):
    folder = build_chatml_dir(tmp_path)
    template = folder / "chat_template.jinja"
    opening = "<|im_start|>assistant\\n"
    assert opening in template.read_text()
    template.write_text(
        template.read_text().replace(
            f"{{%- if add_generation_prompt -%}}{{{{- '{opening}' -}}}}{{%- endif -%}}",
            "{%- if add_generation_prompt -%}{{- '" + opening + "' -}}"
            "{%- if thinking is defined and not thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
            "{%- endif -%}",
        )
    )
    codec = TurnCodec.load(folder)
    async with serving(codec, [{"text": "ok"}]) as serve:
        off = {"thinking": False}
        first = await serve.message("s", HI, chat_template_kwargs=off)
        await serve.message("s", HI)
        told, plain = (codec.decode(call["input_ids"]) for call in serve.calls("s"))
        assert told.endswith("assistant\n<think>\n\n</think>\n\n") and plain.endswith("assistant\n")
        history = [*HI, first, {"role": "user", "content": "more"}]
        same = await serve.post("s", {"messages": history, "chat_template_kwargs": off})
        other = await serve.post("s", {"messages": history, "chat_template_kwargs": {"thinking": True}})
        assert (same.headers["x-silva-match"], other.headers["x-silva-match"]) == ("append", "root")


@pytest.mark.parametrize("name", ["add_generation_prompt", "tokenize", "tools"])
async def test_template_arguments_of_the_server_are_refused(codec: TurnCodec, name: str):
    async with serving(codec, [{"text": "ok"}]) as serve:
        answer = await serve.post("s", {"messages": HI, "chat_template_kwargs": {name: False}})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, f"chat_template_kwargs.{name}")
        assert serve.calls() == []


async def test_tools_are_shown_to_the_model_and_select_the_subtree(codec: TurnCodec):
    async with serving(codec, [{"text": "ok"}]) as serve:
        first = await serve.message("s", HI, tools=[TOOL])
        assert '"look"' in codec.decode(serve.calls("s")[0]["input_ids"])
        history = [*HI, first, {"role": "user", "content": "more"}]
        kept = await serve.post("s", {"messages": history, "tools": [TOOL]})
        dropped = await serve.post("s", {"messages": history})
        assert (kept.headers["x-silva-match"], dropped.headers["x-silva-match"]) == ("append", "root")


async def test_every_reply_has_the_fields_that_clients_read(codec: TurnCodec):
    async with serving(codec, [{"text": "<think>\nhm\n</think>\n\nyes"}]) as serve:
        answer = await serve.chat("s", HI, model="some/model")
        assert (answer["object"], answer["model"]) == ("chat.completion", "some/model")
        assert isinstance(answer["id"], str) and isinstance(answer["created"], int)
        usage = answer["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        thought = codec.encode_sampled("<think>\nhm\n</think>")
        assert usage["completion_tokens_details"]["reasoning_tokens"] == len(thought)
