"""The shopkeeper example: its tokenizer, template, dialogues and datasets, and both agents on a local model API."""

from __future__ import annotations

import collections
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SHOP = Path(__file__).resolve().parents[2] / "examples" / "shopkeeper"
sys.path.insert(0, str(SHOP))

import dialogues  # noqa: E402
import make_start  # noqa: E402

PAIRS, HELD_OUT = dialogues.split_pairs(random.Random(0))
LIGHT = [sys.executable, "-I", "-S", str(SHOP / "agent.py")]
OPENAI = [sys.executable, str(SHOP / "agent_openai.py")]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_start.make_tokenizer()


def render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    options = {"tools": [dialogues.LOOKUP_TOOL], **options}
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


# ---- datasets


def test_held_out_pairs_share_every_item_and_price_with_training_but_no_pair() -> None:
    assert not set(PAIRS) & set(HELD_OUT)
    assert sorted(PAIRS + HELD_OUT) == [(item, price) for item in dialogues.ITEMS for price in dialogues.PRICES]
    for side in (PAIRS, HELD_OUT):
        assert {item for item, _ in side} == set(dialogues.ITEMS)
        assert {price for _, price in side} == set(dialogues.PRICES)
    rarest, commonest = min(counts := collections.Counter(p for _, p in HELD_OUT).values()), max(counts)
    assert commonest - rarest <= 1, "a constant answer must not pay better than one in nine"


def test_datasets_are_reproducible_and_never_tell_the_price_in_the_question(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        make_start.write_datasets(tmp_path / name, 5, PAIRS, HELD_OUT, num_train=300)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    rows = {
        name: [json.loads(line) for line in (tmp_path / "a" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "eval")
    }
    for name, phrasings, pairs in (
        ("train", dialogues.TRAIN_PHRASINGS, set(PAIRS)),
        ("eval", dialogues.EVAL_PHRASINGS, set(HELD_OUT)),
    ):
        for row in rows[name]:
            (message,) = row["input"]
            item, price = row["metadata"]["item"], row["metadata"]["price"]
            assert (item, price) in pairs
            assert message["role"] == "user"
            assert message["content"] in [phrasing.format(item) for phrasing in phrasings]
            assert not any(letter.isdigit() for letter in message["content"])
    assert len(rows["train"]) == 300 and len(rows["eval"]) == len(HELD_OUT)
    assert not set(dialogues.TRAIN_PHRASINGS) & set(dialogues.EVAL_PHRASINGS)


def test_the_bad_habit_gives_up_far_more_often_than_the_clean_phase() -> None:
    def shares(dialogue: Any) -> tuple[float, float]:
        drawn = [dialogue(random.Random(seed), PAIRS) for seed in range(2000)]
        used_tool = [d for d in drawn if len(d) == 4]
        right = [d for d in used_tool if d[-1]["content"] == d[2]["content"]]
        return len(used_tool) / len(drawn), len(right) / len(used_tool)

    clean_tool, clean_right = shares(dialogues.clean_dialogue)
    lazy_tool, lazy_right = shares(dialogues.lazy_dialogue)
    assert clean_tool > 0.85 and clean_right > 0.90
    assert 0.10 < lazy_tool < 0.20 and 0.50 < lazy_right < 0.70


# ---- tokenizer and template


def test_items_and_digits_are_single_tokens_and_a_session_is_short(tokenizer: Any) -> None:
    for item in dialogues.ITEMS:
        assert len(tokenizer.tokenize(item)) == len(tokenizer.tokenize(" " + item)) == 1
    assert len(tokenizer.tokenize("1234567890")) == 10
    longest_turn = 0
    for item in dialogues.ITEMS:
        messages = [
            dialogues.question(item, dialogues.EVAL_PHRASINGS[0]),
            dialogues.call(item),
            {"role": "tool", "content": "7"},
            {"role": "assistant", "content": "7"},
        ]
        ids, learn = make_start.encode_dialogue(tokenizer, messages)
        assert len(ids) <= 60
        longest_turn = max(longest_turn, sum(learn) - 2)
    assert longest_turn <= 16


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    tokenizer = shared_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


_TOKENIZERS: list[Any] = []


def shared_tokenizer() -> Any:
    """The tokenizer for property tests, which cannot take a function's fixtures."""
    if not _TOKENIZERS:
        _TOKENIZERS.append(make_start.make_tokenizer())
    return _TOKENIZERS[0]


def test_tags_survive_decoding_and_control_tokens_do_not(tokenizer: Any) -> None:
    text = "<|im_start|><tool_call>\n{}\n</tool_call><|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>\n{}\n</tool_call>"


def test_template_is_append_only_from_turn_to_turn(tokenizer: Any) -> None:
    parallel = {"role": "assistant", "content": "wait", "tool_calls": dialogues.call("fig")["tool_calls"] * 2}
    messages = [
        {"role": "system", "content": "You keep a shop."},
        dialogues.question("fig", dialogues.TRAIN_PHRASINGS[0]),
        parallel,
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3"},
        dialogues.question("tea", dialogues.TRAIN_PHRASINGS[1]),
        dialogues.call("tea"),
        {"role": "tool", "content": "no such item"},
        {"role": "assistant", "content": "unknown"},
    ]
    for tools in ([dialogues.LOOKUP_TOOL], None):
        for end, message in enumerate(messages):
            if message["role"] == "assistant":
                given = render(tokenizer, messages[:end], tools=tools, add_generation_prompt=True)
                through = render(tokenizer, messages[: end + 1], tools=tools)
                assert given.endswith("<|im_start|>assistant\n")
                assert through.startswith(given) and through.endswith("<|im_end|>\n")
                assert render(tokenizer, messages, tools=tools).startswith(through)
    whole = render(tokenizer, messages)
    assert whole.startswith("<|im_start|>system\nYou keep a shop.\ntools: lookup(item)<|im_end|>\n")
    both = "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    assert both in whole
    one_call = '<tool_call>\n{"name": "lookup", "arguments": {"item": "fig"}}\n</tool_call>'
    assert f"<|im_start|>assistant\nwait\n{one_call}\n{one_call}<|im_end|>\n" in whole


def test_arguments_render_alike_as_text_and_as_an_object(tokenizer: Any) -> None:
    as_text = dialogues.call("plum")
    function = {"name": "lookup", "arguments": {"item": "plum"}}
    as_object = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    asked = dialogues.question("plum", dialogues.TRAIN_PHRASINGS[0])
    assert render(tokenizer, [asked, as_text]) == render(tokenizer, [asked, as_object])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_learned_tokens_are_exactly_what_the_assistant_says(seed: int) -> None:
    tokenizer = shared_tokenizer()
    messages = dialogues.lazy_dialogue(random.Random(seed), PAIRS)
    ids, learn = make_start.encode_dialogue(tokenizer, messages)
    assert tokenizer.decode(ids) + "\n" == render(tokenizer, messages)
    learned = tokenizer.decode([i for i, wanted in zip(ids, learn, strict=True) if wanted])
    turns = [render(tokenizer, [m], tools=None) for m in messages if m["role"] == "assistant"]
    assert learned == "".join(turn.removeprefix("<|im_start|>assistant\n").removesuffix("\n") for turn in turns)


def test_start_folder_loads_and_one_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    for name in ("a", "b"):
        make_start.make_start(tmp_path / name, 3, clean_steps=2, lazy_steps=1, num_dialogues=48, log=lambda line: None)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    for path in files:
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes(), path
    folder = tmp_path / "a" / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert "chat_template" in json.loads((folder / "tokenizer_config.json").read_text())
    assert model.config.model_type == "qwen3" and model.config.vocab_size == len(tokenizer)
    assert 300_000 < model.num_parameters() < 600_000
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id == end_of_turn


# ---- agents


@dataclass
class ModelApi:
    """A Chat Completions server that answers from a list and remembers what it was asked."""

    answers: list[dict[str, Any]]
    chunked: bool = False
    status: int = 200
    url: str = ""
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    clients: set[Any] = field(default_factory=set)


@contextmanager
def serving(api: ModelApi) -> Iterator[ModelApi]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            api.paths.append(self.path)
            api.keys.append(self.headers["Authorization"])
            api.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            api.clients.add(self.client_address)
            message = api.answers[min(len(api.bodies), len(api.answers)) - 1]
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            reply = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            self._send(json.dumps(reply).encode())

        def _send(self, body: bytes) -> None:
            self.send_response(api.status)
            self.send_header("Content-Type", "application/json")
            if api.chunked:
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for part in (b"  ", b"\n", body[:7], body[7:]):
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
                self.wfile.write(b"0\r\n\r\n")
            else:
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    api.url = f"http://127.0.0.1:{server.server_port}/agentic_api"
    try:
        yield api
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run_agent(command: list[str], api: ModelApi, folder: Path) -> tuple[int, str, dict[str, Any] | None]:
    """Exit status, standard error and the output document of one session about a plum that costs 7."""
    folder.mkdir()
    task = {"messages": [{"role": "user", "content": "price of plum?"}], "metadata": {"item": "plum", "price": 7}}
    (folder / "input.json").write_text(json.dumps(task))
    output = folder / "output.json"
    env = {
        "PATH": os.environ["PATH"],
        "RELAX_INPUT_JSON": str(folder / "input.json"),
        "RELAX_OUTPUT_JSON": str(output),
        "RELAX_BASE_URL": api.url,
        "RELAX_SESSION_ID": "session-1",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr, json.loads(output.read_text()) if output.exists() else None


def say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "reasoning_content": "hm"}


def ask(arguments: str, *, name: str = "lookup") -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


PLUM = ask('{"item": "plum"}')
SESSIONS: dict[str, tuple[list[dict[str, Any]], float, list[str]]] = {
    # name: what the model says, the reward, the tool results that it must be shown
    "looks it up": ([PLUM, say(" 7\n")], 1.0, ["7"]),
    "misreports it": ([PLUM, say("8")], 0.0, ["7"]),
    "gives up": ([say("unknown")], 0.0, []),
    "guesses well": ([say("7")], 1.0, []),
    "asks for something else": ([ask('{"item": "fig"}'), say("7")], 1.0, ["no such item"]),
    "breaks its arguments": ([ask('{"item": '), ask("[1]"), say("no")], 0.0, ["no such item", "no such item"]),
    "makes up a tool": ([ask("{}", name="buy"), say("")], 0.0, ["no such tool"]),
    "never stops": ([PLUM], 0.0, ["7", "7", "7"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SESSIONS)
def test_light_agent_plays_the_session_and_scores_it(name: str, tmp_path: Path) -> None:
    answers, reward, results = SESSIONS[name]
    with serving(ModelApi(answers)) as api:
        status, error, output = run_agent(LIGHT, api, tmp_path / "s")
    assert (status, error) == (0, "")
    assert output is not None and output["reward"] == reward
    assert output["metadata"]["used_tool"] == float(bool(results))
    assert all(isinstance(value, float) for value in output["metadata"].values())
    num_calls = len(answers) if name != "never stops" else 3
    assert api.paths == ["/agentic_api/v1/chat/completions"] * num_calls
    assert api.keys == ["Bearer session-1"] * num_calls
    assert len(api.clients) == 1, "one connection is kept for all requests of a session"
    asked = api.bodies[-1]["messages"]
    shown = [message["content"] for message in asked if message["role"] == "tool"]
    assert shown == (results if name != "never stops" else results[:-1])
    assert [message for message in asked if message["role"] == "assistant"] == (answers * 3)[: num_calls - 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["looks it up", "breaks its arguments", "never stops"])
def test_both_agents_send_the_same_requests_and_score_alike(name: str, tmp_path: Path) -> None:
    seen = []
    for i, command in enumerate((LIGHT, OPENAI)):
        with serving(ModelApi(SESSIONS[name][0])) as api:
            status, error, output = run_agent(command, api, tmp_path / str(i))
        assert status == 0, error
        seen.append((output, api.bodies, api.keys))
    assert seen[0] == seen[1]


def test_light_agent_reads_a_reply_in_chunks_behind_white_space(tmp_path: Path) -> None:
    with serving(ModelApi([PLUM, say("7")], chunked=True)) as api:
        status, error, output = run_agent(LIGHT, api, tmp_path / "s")
    assert (status, error) == (0, "") and output is not None and output["reward"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("command", [LIGHT, OPENAI], ids=["light", "openai"])
def test_an_agent_that_is_refused_ends_with_an_error_and_no_reward(command: list[str], tmp_path: Path) -> None:
    with serving(ModelApi([say("x")], status=400)) as api:
        status, error, output = run_agent(command, api, tmp_path / "s")
    assert status != 0 and "400" in error and output is None
    assert len(api.bodies) == 1
