"""Field cases about token identity and turn boundaries, through the real door: HTTP in, engine log and sample out."""

from __future__ import annotations

import copy
import itertools
import json

import pytest
from gateway_serve import Json, Serve, serving

from silva.codec import TurnCodec
from silva.types.errors import SessionFailure

HI: list[Json] = [{"role": "user", "content": "hi"}]
WEATHER_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO_CALLS = CALL + '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def result(call: Json, text: str) -> Json:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def id_of(codec: TurnCodec, token: str) -> int:
    (token_id,) = codec.encode_sampled(token)
    return token_id


def rendered(codec: TurnCodec, messages: list[Json], tools: list[Json] | None = None) -> list[int]:
    """What the chat template itself makes of a history."""
    for_template = copy.deepcopy(messages)
    for message in for_template:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return codec.tokenizer.apply_chat_template(
        for_template, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )


async def test_tok_01_ids_that_no_tokenizer_would_choose_are_kept(codec: TurnCodec):
    letters = [codec.encode_sampled(letter)[0] for letter in "hello"]
    assert len(codec.encode_sampled("hello")) < len(letters)
    line = {"ids": letters, "logprobs": [-0.1, -0.2, -0.3, -0.4, -0.5], "append_eos": False, "finish_reason": "length"}
    async with serving(codec, [line, {"text": "ok"}]) as serve:
        first = await serve.message("s", HI)
        assert first["content"] == "hello"
        await serve.message("s", [*HI, first, user("more")])
        one, two = (call["input_ids"] for call in serve.calls("s"))
        assert two[len(one) : len(one) + 5] == letters
        sample = serve.sample("s")
        assert sample.token_ids[len(one) : len(one) + 5] == letters
        assert sample.loss_mask[len(one) : len(one) + 5] == [1] * 5
        assert sample.logprobs[len(one) : len(one) + 5] == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5])


async def test_tok_03_the_newline_behind_the_end_of_turn_is_kept_over_five_tool_turns(codec: TurnCodec):
    async with serving(codec, [{"text": CALL}]) as serve:
        history: list[Json] = [user("weather?")]
        for turn in range(5):
            message = await serve.message("s", history, tools=[WEATHER_TOOL])
            history += [message, result(message["tool_calls"][0], f"sunny {turn}")]
        await serve.message("s", history, tools=[WEATHER_TOOL])
        last = serve.calls("s")[-1]["input_ids"]
        assert last == rendered(codec, history, [WEATHER_TOOL])
        sample = serve.sample("s")
        end, newline = id_of(codec, "<|im_end|>"), id_of(codec, "\n")
        closes = [at for at, token in enumerate(sample.token_ids) if token == end and sample.loss_mask[at] == 1]
        assert len(closes) == 6
        for at in closes[:-1]:
            assert (sample.token_ids[at + 1], sample.loss_mask[at + 1]) == (newline, 0)


@pytest.mark.parametrize("case", ["closed", "doubled", "cut"])
async def test_tok_04_exactly_one_end_of_turn_whatever_the_engine_did(codec: TurnCodec, case: str):
    end, pad = id_of(codec, "<|im_end|>"), id_of(codec, "<|endoftext|>")
    text = codec.encode_sampled("hello")
    lines = {
        "closed": {"ids": [*text, end], "append_eos": False},
        "doubled": {"ids": [*text, end, pad], "append_eos": False},
        "cut": {"ids": text, "finish_reason": "length"},
    }
    async with serving(codec, [lines[case], {"text": "ok"}]) as serve:
        first = await serve.message("s", HI)
        assert first["content"] == "hello"
        await serve.message("s", [*HI, first, user("go on")])
        one, two = (call["input_ids"] for call in serve.calls("s"))
        turn = two[len(one) : two.index(id_of(codec, "<|im_start|>"), len(one))]
        assert turn.count(end) == 1
        assert pad not in two
        assert serve.turns.counters["cut_after_stop_id"] == (case == "doubled")
        sample = serve.sample("s")
        at = len(one) + len(text)
        assert sample.token_ids[at] == end
        assert sample.loss_mask[at] == (0 if case == "cut" else 1)
        assert (sample.logprobs[at] == 0.0) == (case == "cut")


async def test_tok_06_a_turn_cut_by_length_goes_on_without_loss(codec: TurnCodec):
    async with serving(codec, [{"text": "wait no yes and so on"}, {"text": "ok"}]) as serve:
        answer = await serve.chat("s", HI, max_tokens=3)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 3
        await serve.message("s", [*HI, answer["choices"][0]["message"], user("continue")])
        one, two = (call["input_ids"] for call in serve.calls("s"))
        sampled = list(serve.responses("s")[0].sampled)
        assert sampled == codec.encode_sampled("wait no yes and so on")[:3]
        assert two[: len(one) + 3] == one + sampled
        assert (
            codec.decode(two[len(one) + 3 :])
            == "<|im_end|>\n<|im_start|>user\ncontinue<|im_end|>\n<|im_start|>assistant\n"
        )
        sample = serve.sample("s")
        assert sum(sample.loss_mask[len(one) + 3 : len(two)]) == 0


async def test_tok_06_a_cut_turn_sent_last_is_continued(codec: TurnCodec):
    async with serving(codec, [{"text": "wait no", "finish_reason": "length"}, {"text": " and yes"}]) as serve:
        first = await serve.message("s", HI)
        second = await serve.message("s", [*HI, first])
        assert second["content"] == " and yes"
        one, two = (call["input_ids"] for call in serve.calls("s"))
        assert two == one + list(serve.responses("s")[0].sampled)
        whole = {"role": "assistant", "content": first["content"] + second["content"]}
        await serve.message("s", [*HI, whole, user("next")])
        assert len(serve.sample("s").token_ids) > len(two)


async def test_tok_07a_a_template_that_drops_old_thoughts_does_not_break_the_lineage(forgetful_codec: TurnCodec):
    script = [{"text": f"<think>\nR{n}\n</think>\n\nA{n}"} for n in range(4)]
    async with serving(forgetful_codec, script) as serve:
        history = list(HI)
        for turn in range(4):
            message = await serve.message("s", history)
            assert (message["reasoning_content"], message["content"]) == (f"R{turn}", f"A{turn}")
            history += [message, user(f"go {turn}")]
        sample = serve.sample("s")
        calls = serve.calls("s")
        for earlier, later in itertools.pairwise(calls):
            assert later["input_ids"][: len(earlier["input_ids"])] == earlier["input_ids"]
        trained = forgetful_codec.decode([t for t, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on])
        assert all(f"<think>\nR{turn}\n</think>" in trained for turn in range(4))


async def test_tok_07b_under_exact_matching_dropped_thoughts_branch_and_are_reported(codec: TurnCodec):
    script = [{"text": f"<think>\nR{n}\n</think>\n\nA{n}"} for n in range(3)]
    async with serving(codec, script, agentic_echo_match="exact") as serve:
        history = list(HI)
        for turn in range(3):
            message = await serve.message("s", history)
            history += [{"role": "assistant", "content": message["content"]}, user(f"go {turn}")]
        assert len(serve.responses("s")) == 3
        with pytest.raises(SessionFailure, match="not linear"):
            serve.sample("s")
        for node in serve.responses("s"):
            serve.sample("s", node)


async def test_tok_08_blanks_of_the_model_reach_the_client_and_match_again(codec: TurnCodec):
    text = "<think>\n plan \n</think>\n\n  answer \n"
    async with serving(codec, [{"text": text}], agentic_echo_match="exact") as serve:
        for session, strips in (("verbatim", False), ("stripped", True)):
            message = await serve.message(session, HI)
            assert (message["reasoning_content"], message["content"]) == (" plan ", "  answer \n")
            echo = {**message, "content": message["content"].strip()} if strips else message
            answer = await serve.post(session, {"messages": [*HI, echo, user("next")]})
            assert (answer.headers["x-silva-match"] == "append") != strips
            first = serve.responses(session)[0]
            assert codec.decode(list(first.sampled)) == text + "<|im_end|>"
        serve.sample("verbatim")


CONTENT_FORMS = {"null": {"content": None}, "empty": {"content": ""}, "absent": {}, "no_parts": {"content": []}}


async def test_tok_09_absent_content_of_a_call_turn_is_one_state_in_every_form(codec: TurnCodec):
    inputs: list[list[int]] = []
    async with serving(codec, [{"text": CALL}, {"text": "it is sunny"}]) as serve:
        for name, form in CONTENT_FORMS.items():
            message = await serve.message(name, [user("weather?")], tools=[WEATHER_TOOL])
            assert message["content"] is None
            echo = {"role": "assistant", "tool_calls": message["tool_calls"], **form}
            tail = result(message["tool_calls"][0], "")
            await serve.message(name, [user("weather?"), echo, tail], tools=[WEATHER_TOOL])
            assert len(serve.forest(name).nodes) == 5
            inputs.append(serve.calls(name)[1]["input_ids"])
            serve.sample(name)
        assert all(ids == inputs[0] for ids in inputs)
        assert "(no output)" in codec.decode(inputs[0])


@pytest.mark.slow
@pytest.mark.parametrize("role", ["user", "system"])
@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
async def test_tok_09_empty_user_or_system_content_names_the_message(codec: TurnCodec, role: str, content: object):
    async with serving(codec, [{"text": "ok"}]) as serve:
        messages = [{"role": "system", "content": "be brief"}, *HI, {"role": role, "content": content}]
        answer = await serve.post("s", {"messages": messages})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages[2].content"
        assert serve.calls() == []


ARGUMENTS = '{"city": "Paris","n":1.0,"k":1e3}'
ECHOES: dict[str, object] = {
    "verbatim": ARGUMENTS,
    "compact": '{"city":"Paris","n":1.0,"k":1000.0}',
    "sorted": '{"city": "Paris", "k": 1e3, "n": 1.0}',
    "javascript": '{"city":"Paris","n":1,"k":1000}',
    "escaped": '{"city": "\\u0050aris", "n": 1.0, "k": 1000}',
    "object": {"city": "Paris", "n": 1.0, "k": 1e3},
}


async def test_tok_10_arguments_written_anew_are_the_same_turn(codec: TurnCodec):
    line = '<tool_call>\n{"name": "weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
    async with serving(codec, [{"text": line}, {"text": "ok"}]) as serve:
        for name, arguments in ECHOES.items():
            message = await serve.message(name, HI)
            assert message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
            tail = result(message["tool_calls"][0], "sunny")
            message["tool_calls"][0]["function"]["arguments"] = arguments
            await serve.message(name, [*HI, message, tail])
            assert len(serve.forest(name).nodes) == 5, name
            one, two = (call["input_ids"] for call in serve.calls(name))
            sampled = list(serve.responses(name)[0].sampled)
            assert two[len(one) : len(one) + len(sampled)] == sampled, name


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [
        ('{"a": 1}', '{"a": 2}'),
        ('{"a":1,"a":2}', '{"a":2}'),
        ('{"a": 12345678901234567890}', '{"a": 12345678901234567000}'),
    ],
)
async def test_tok_10_other_values_are_another_history(codec: TurnCodec, sent: str, echoed: str):
    line = '<tool_call>\n{"name": "weather", "arguments": ' + sent + "}\n</tool_call>"
    async with serving(codec, [{"text": line}, {"text": "ok"}]) as serve:
        message = await serve.message("s", HI)
        before = list(serve.responses("s")[0].ids)
        tail = result(message["tool_calls"][0], "sunny")
        message["tool_calls"][0]["function"]["arguments"] = echoed
        answer = await serve.post("s", {"messages": [*HI, message, tail]})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-silva-match"] == "branch"
        assert list(serve.responses("s")[0].ids) == before
        for node in serve.responses("s"):
            serve.sample("s", node)


async def test_tok_14_a_generation_prompt_that_opens_a_thought_is_prompt(thinking_codec: TurnCodec):
    text = "plan</think>\n\nhi"
    async with serving(thinking_codec, [{"text": text}, {"text": "more</think>\n\nbye"}]) as serve:
        message = await serve.message("s", HI)
        assert (message["reasoning_content"], message["content"]) == ("plan", "hi")
        one = serve.calls("s")[0]["input_ids"]
        assert thinking_codec.decode(one).endswith("<|im_start|>assistant\n<think>\n")
        sample = serve.sample("s")
        assert sample.prompt_len == len(one)
        assert sum(sample.loss_mask) == len(thinking_codec.encode_sampled(text)) + 1
        second = await serve.message("s", [*HI, message, user("next")])
        assert (second["reasoning_content"], second["content"]) == ("more", "bye")
        serve.sample("s")


async def _two_calls(serve: Serve, session: str) -> tuple[list[Json], Json, Json]:
    message = await serve.message(session, [user("weather?")], tools=[WEATHER_TOOL])
    first, second = message["tool_calls"]
    return [user("weather?"), message], result(first, "sunny"), result(second, "rainy")


@pytest.mark.parametrize("variant", ["in_order", "reversed", "with_user", "two_requests"])
async def test_tok_15_tool_results_are_grouped_as_the_template_groups_them(codec: TurnCodec, variant: str):
    async with serving(codec, [{"text": TWO_CALLS}, {"text": "ok"}]) as serve:
        history, first, second = await _two_calls(serve, "s")
        if variant == "two_requests":
            await serve.message("s", [*history, first], tools=[WEATHER_TOOL])
        tail = [second, first] if variant == "reversed" else [first, second]
        if variant == "with_user":
            tail.append(user("and tomorrow?"))
        await serve.message("s", [*history, *tail], tools=[WEATHER_TOOL])
        given = serve.calls("s")[-1]["input_ids"]
        assert given == rendered(codec, [*history, *tail], [WEATHER_TOOL])
        assert len({call["id"] for call in history[1]["tool_calls"]}) == 2
        for node in serve.responses("s"):
            serve.sample("s", node)


async def test_tok_15_a_tool_result_without_a_call_is_refused_with_the_templates_words(codec: TurnCodec):
    async with serving(codec, [{"text": "ok"}]) as serve:
        answer = await serve.post("s", {"messages": [*HI, {"role": "tool", "tool_call_id": "x", "content": "42"}]})
        assert answer.status_code == 400
        assert "a tool result needs a call before it" in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "template_refused"


def _dumped(message: Json) -> Json:
    extra = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "name": None}
    return {**message, **extra, "tool_calls": message.get("tool_calls")}


def _indexed(message: Json) -> Json:
    calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls") or [])]
    return {**message, "tool_calls": calls or None}


SDK_FORMS = {
    "verbatim": lambda message: message,
    "dumped": _dumped,
    "indexed": _indexed,
    "parts": lambda message: {**message, "content": [{"type": "text", "text": message["content"]}]},
    "two_parts": lambda message: {
        **message,
        "content": [{"type": "text", "text": message["content"][:2]}, {"type": "text", "text": message["content"][2:]}],
    },
    "provider": lambda message: {**message, "provider_specific_fields": {"a": 1}},
    "key_order": lambda message: dict(reversed(list(message.items()))),
    "only_reasoning": lambda message: {key: value for key, value in message.items() if key != "reasoning_content"},
}


async def test_tok_17_bookkeeping_of_sdks_does_not_change_who_a_message_is(codec: TurnCodec):
    async with serving(codec, [{"text": "<think>\nhm\n</think>\n\nLet me see.\n" + CALL}, {"text": "ok"}]) as serve:
        for name, form in SDK_FORMS.items():
            message = await serve.message(name, HI)
            tail = result(message["tool_calls"][0], "sunny")
            await serve.message(name, [*HI, form(message), tail])
            assert len(serve.forest(name).nodes) == 5, name
            serve.sample(name)


async def test_tok_17_null_calls_of_a_text_turn_are_no_calls(codec: TurnCodec):
    async with serving(codec, [{"text": "Let me see."}, {"text": "ok"}]) as serve:
        for name in ("verbatim", "dumped", "indexed", "parts", "provider"):
            message = await serve.message(name, HI)
            await serve.message(name, [*HI, SDK_FORMS[name](message), user("go on")])
            assert len(serve.forest(name).nodes) == 5, name
            serve.sample(name)


def _changed_call(**fields: str) -> dict[str, object]:
    call = {"id": "call_x", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    call["function"].update({key: value for key, value in fields.items() if key != "id"})  # type: ignore[union-attr]
    call["id"] = fields.get("id", call["id"])
    return call


async def test_tok_17_what_carries_meaning_makes_another_state(codec: TurnCodec):
    changes = [
        {"content": "Let me think."},
        {"reasoning_content": "other", "reasoning": "other"},
        {"tool_calls": [_changed_call(name="climate")]},
        {"tool_calls": [_changed_call(arguments='{"city": "Rome"}')]},
        {"tool_calls": [_changed_call(id="call_y")]},
    ]
    async with serving(codec, [{"text": "<think>\nhm\n</think>\n\nLet me see.\n" + CALL}, {"text": "ok"}]) as serve:
        for number, change in enumerate(changes):
            message = await serve.message(f"s{number}", HI)
            tail = result(message["tool_calls"][0], "sunny")
            answer = await serve.post(f"s{number}", {"messages": [*HI, {**message, **change}, tail]})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-silva-match"] == "branch", change


async def test_tok_19_example_answers_in_the_first_prompt_are_not_trained(codec: TurnCodec):
    history = [
        {"role": "system", "content": "be brief"},
        user("example question"),
        {"role": "assistant", "content": "example answer"},
        user("real question"),
    ]
    async with serving(codec, [{"text": "the reply"}]) as serve:
        await serve.message("s", history)
        sample = serve.sample("s")
        assert sample.num_turns == 1
        trained = [token for token, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on]
        assert codec.decode(trained) == "the reply<|im_end|>"
        assert "example answer" in codec.decode(sample.token_ids[: sample.prompt_len])
        assert len(serve.responses("s")) == 1
