"""Field cases about assistant messages that come back changed, under lenient and exact matching."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import pytest
from gateway_serve import Json, Serve, serving

from silva.codec import TurnCodec
from silva.types.errors import SessionFailure

HI: list[Json] = [{"role": "user", "content": "hi"}]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def trained_text(serve: Serve, session: str) -> str:
    sample = serve.sample(session)
    return serve.codec.decode([t for t, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on])


@pytest.mark.parametrize("mode", ["lenient", "exact"])
async def test_tok_07b_dropped_thoughts_go_on_or_branch(codec: TurnCodec, mode: str):
    script = [{"text": f"<think>\nR{n}\n</think>\n\nA{n}"} for n in range(4)]
    async with serving(codec, script, agentic_echo_match=mode) as serve:
        history = list(HI)
        matches: list[str] = []
        for turn in range(4):
            answer = await serve.post("s", {"messages": history})
            matches.append(answer.headers["x-silva-match"])
            assert answer.headers["x-silva-repairs"] == ("1" if turn and mode == "lenient" else "0")
            message = answer.json()["choices"][0]["message"]
            history += [{"role": "assistant", "content": message["content"]}, user(f"go {turn}")]
        records = serve.session("s").requests
        given = [call["input_ids"] for call in serve.calls("s")]
        sampled = [list(node.sampled) for node in serve.responses("s")]
        for before, ids, after in zip(given, sampled, given[1:], strict=False):
            assert (after[: len(before) + len(ids)] == before + ids) == (mode == "lenient")
        if mode == "exact":
            assert matches == ["root", "branch", "branch", "branch"]
            with pytest.raises(SessionFailure, match="not linear"):
                serve.sample("s")
            assert [record.difference for record in records] == [
                None,
                *(
                    {"pointer": f"/messages/{2 * turn + 1}/reasoning_content", "old": f"R{turn}", "new": None}
                    for turn in range(3)
                ),
            ]
            assert not any(name.startswith("repair_") for name in serve.turns.counters)
            return
        assert matches == ["root", "append", "append", "append"]
        assert [record.repairs for record in records] == [[], *[["reasoning_missing"]] * 3]
        assert all(record.difference is None for record in records)
        assert serve.turns.counters["repair_reasoning_missing"] == 3
        assert trained_text(serve, "s") == "".join(f"<think>\nR{n}\n</think>\n\nA{n}<|im_end|>" for n in range(4))


@pytest.mark.parametrize("mode", ["lenient", "exact"])
async def test_tok_08_stripped_blanks_go_on_or_branch(codec: TurnCodec, mode: str):
    text = "<think>\n plan \n</think>\n\n  answer \n"
    async with serving(codec, [{"text": text}], agentic_echo_match=mode) as serve:
        for session, strips in (("verbatim", False), ("stripped", True)):
            message = await serve.message(session, HI)
            echo = {**message, "content": message["content"].strip()} if strips else message
            answer = await serve.post(session, {"messages": [*HI, echo, user("next")]})
            lost = strips and mode == "exact"
            assert answer.headers["x-silva-match"] == ("branch" if lost else "append")
            record = serve.session(session).requests[-1]
            assert record.repairs == (["blanks"] if strips and not lost else [])
            expected = {"pointer": "/messages/1/content", "old": "  answer \n", "new": "answer"}
            assert record.difference == (expected if lost else None)
            first = serve.responses(session)[0]
            assert codec.decode(list(first.sampled)) == text + "<|im_end|>"
            assert len([node for node in serve.responses(session) if node.parent is first.parent]) == 1
        serve.sample("verbatim")


FORMS: dict[str, Json] = {
    "reasoning": {"content": "A", "reasoning": "R"},
    "reasoning_content": {"content": "A", "reasoning_content": "R"},
    "both": {"content": "A", "reasoning": "R", "reasoning_content": "R"},
    "neither": {"content": "A"},
    "inline": {"content": "<think>R</think>A"},
}


@pytest.mark.parametrize("mode", ["lenient", "exact"])
async def test_api_05_every_name_of_the_reasoning_is_the_same_turn(codec: TurnCodec, mode: str):
    async with serving(codec, [{"text": "<think>\nR\n</think>\n\nA"}], agentic_echo_match=mode) as serve:
        for name, form in FORMS.items():
            message = await serve.message(name, HI)
            assert message["reasoning_content"] == message["reasoning"] == "R"
            answer = await serve.post(name, {"messages": [*HI, {"role": "assistant", **form}, user("next")]})
            goes_on = name != "inline" and (name != "neither" or mode == "lenient")
            assert answer.headers["x-silva-match"] == ("append" if goes_on else "branch"), name
            assert len(serve.forest(name).nodes) == 5
            if goes_on:
                assert serve.responses(name)[1].parent.parent is serve.responses(name)[0]


def billed(nonce: str) -> list[Json]:
    """Claude Code's system blocks: the first one is another in each request."""
    header = f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={nonce};"
    return [{"type": "text", "text": header}, {"type": "text", "text": "You are Claude Code."}]


async def speak(serve: Serve, protocol: str, nonces: Sequence[str]) -> list[httpx.Response]:
    """One conversation, each turn under the next nonce, as the client of a protocol sends it."""
    answers: list[httpx.Response] = []
    history: list[Json] = []
    for turn, nonce in enumerate(nonces):
        history.append(user(f"q{turn}"))
        system, text = billed(nonce), "".join(block["text"] for block in billed(nonce))
        body: Json = {"model": "m", "max_tokens": 64, "messages": history, "system": system}
        path = "/v1/messages?beta=true"
        if protocol == "chat":
            body, path = {"messages": [{"role": "system", "content": system}, *history]}, "/v1/chat/completions"
        elif protocol == "responses":
            body, path = {"instructions": text, "input": history}, "/v1/responses"
        answers.append(await serve.post("s", body, path=path))
        assert answers[-1].status_code == 200, answers[-1].text
        history.append({"role": "assistant", "content": f"a{turn}"})
    return answers


@pytest.mark.parametrize("protocol", ["messages", "chat", "responses"])
async def test_tok_20_a_nonce_in_the_system_prompt_makes_no_second_root(codec: TurnCodec, protocol: str):
    async with serving(codec, [{"text": "a0"}, {"text": "a1"}]) as serve:
        answers = await speak(serve, protocol, ["fa690", "36ee5"])
        assert [answer.headers["x-silva-match"] for answer in answers] == ["root", "append"]
        assert [answer.headers["x-silva-repairs"] for answer in answers] == ["1", "1"]
        repair = "profile:claude-code-billing@1"
        assert [record.repairs for record in serve.session("s").requests] == [[repair], [repair]]
        assert serve.turns.counters[f"repair_{repair}"] == 2 and serve.turns.counters["match_root"] == 1
        assert serve.sample("s").num_turns == 2
        read = codec.decode(serve.calls("s")[1]["input_ids"])
        assert "cch=fa690;You are" in read and "36ee5" not in read


async def test_tok_20_without_the_profile_there_are_two_roots_and_a_reason(codec: TurnCodec):
    async with serving(codec, [{"text": "a0"}, {"text": "a1"}], agentic_profiles=["none"]) as serve:
        answers = await speak(serve, "messages", ["fa690", "36ee5"])
        assert [answer.headers["x-silva-match"] for answer in answers] == ["root", "root"]
        difference = serve.session("s").requests[1].difference
        assert difference is not None and difference["pointer"] == "/system/content"
        assert "cch=fa690" in difference["old"] and "cch=36ee5" in difference["new"]


async def test_tok_20_noise_is_never_named_as_the_difference(codec: TurnCodec):
    async with serving(codec, [{"text": "a0"}]) as serve:
        await speak(serve, "messages", ["1"])
        history = [user("q0"), {"role": "assistant", "content": "other"}, user("q1")]
        await serve.post("s", {"max_tokens": 9, "system": billed("2"), "messages": history}, path="/v1/messages")
        difference = serve.session("s").requests[1].difference
        assert difference == {"pointer": "/messages/1/content", "old": "a0", "new": "other"}


async def test_tok_20_a_longer_first_request_goes_on_behind_the_first_seen_text(codec: TurnCodec):
    async with serving(codec, [{"text": "a0"}]) as serve:
        for nonce, texts in (("1", ["q0"]), ("2", ["q0", "q1"])):
            body = {"max_tokens": 9, "system": billed(nonce), "messages": [user(text) for text in texts]}
            answer = await serve.post("s", body, path="/v1/messages")
            assert answer.status_code == 200, answer.text
        first, second = serve.responses("s")
        assert second.parent is not None and second.parent.parent is first.parent
        assert "cch=2" not in codec.decode(serve.calls("s")[1]["input_ids"])
