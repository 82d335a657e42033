"""The search example: its invented facts and lessons, the search service, the team's credit, and both agents."""

from __future__ import annotations

import collections
import importlib.util
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

SEARCH = Path(__file__).resolve().parents[2] / "examples" / "search_r1"
sys.path[:0] = [str(SEARCH), str(SEARCH.parent)]

import advantage  # noqa: E402
import client  # noqa: E402
import facts  # noqa: E402
import lessons  # noqa: E402
import search_service  # noqa: E402
import start_model  # noqa: E402
import team_agent  # noqa: E402
from silva_command import show  # noqa: E402

# The shopkeeper has a `make_start`, too.
_spec = importlib.util.spec_from_file_location("search_r1_make_start", SEARCH / "make_start.py")
assert _spec is not None and _spec.loader is not None
make_start = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_start)

REGISTRY = facts.all_facts(random.Random(0))
KNOWN, HELD_OUT = facts.split_facts(random.Random(0), REGISTRY)
CORPUS = facts.corpus(random.Random(0), REGISTRY)
Json = dict[str, Any]


# ---- facts and lessons


def test_held_out_facts_are_one_of_each_name_and_known_to_no_training_row(tmp_path: Path) -> None:
    assert len(REGISTRY) == 200 and sorted(KNOWN + HELD_OUT) == REGISTRY and not set(KNOWN) & set(HELD_OUT)
    assert {fact.name for fact in HELD_OUT} == {fact.name for fact in KNOWN} == set(facts.NAMES)
    commonest = collections.Counter(fact.value for fact in REGISTRY).values()
    assert set(commonest) == {8}, "no value is a better guess than another"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        make_start.write_datasets(tmp_path / name, 5, KNOWN, HELD_OUT, num_train=200, num_team_eval=50)
    rows = {}
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
        rows[path.stem] = [json.loads(line)["input"][0]["content"] for line in path.read_text().splitlines()]
    assert {name: len(texts) for name, texts in rows.items()} == {
        "train": 200,
        "eval": 80,
        "team_train": 200,
        "team_eval": 50,
    }
    asked = {name: [asked_about(text) for text in texts] for name, texts in rows.items()}
    known, held_out = ({(fact.name, fact.attribute) for fact in side} for side in (KNOWN, HELD_OUT))
    assert all(set(pairs) <= known for name in ("train", "team_train") for pairs in asked[name])
    assert all(set(pairs) <= held_out for name in ("eval", "team_eval") for pairs in asked[name])
    assert {len(pairs) for pairs in asked["train"] + asked["eval"]} == {1}
    assert {len(pairs) for pairs in asked["team_train"] + asked["team_eval"]} == {2}
    assert not {*facts.TRAIN_PHRASINGS, *facts.TRAIN_PAIR_PHRASINGS} & {
        *facts.EVAL_PHRASINGS,
        *facts.EVAL_PAIR_PHRASINGS,
    }


def asked_about(text: str) -> list[tuple[str, str]]:
    """Names and attributes of a question, in their order."""
    words = [word.strip("?,:") for word in text.split()]
    named = [word for word in words if word in facts.NAMES]
    return list(zip(named, [word for word in words if word in facts.VALUES], strict=True))


@given(seed=st.integers(0, 10**6), lazy=st.booleans())
def test_a_lesson_asks_only_for_known_facts_and_says_what_it_was_shown(seed: int, lazy: bool) -> None:
    messages, tools = lessons.draw(random.Random(seed), KNOWN, lazy=lazy)
    assert (messages, tools) == lessons.draw(random.Random(seed), KNOWN, lazy=lazy)
    known = {(fact.name, fact.attribute) for fact in KNOWN}
    pairs = asked_about(messages[0]["content"])
    assert set(pairs) <= known and len(pairs) == (2 if tools == [lessons.ASK_SEARCHER_TOOL] else 1)
    assert messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    shown = " ".join(message["content"] for message in messages if message["role"] == "tool")
    answer = messages[-1]["content"]
    if not lazy and answer != lessons.GIVE_UP:
        assert {word for word in answer.split() if word != "and"} <= set(shown.replace(".", "").split())


def test_the_bad_habit_gives_up_far_more_often() -> None:
    for lesson in (lessons.searcher_lesson, lessons.main_lesson):
        drawn = {lazy: [lesson(random.Random(i), KNOWN, lazy=lazy)[0] for i in range(500)] for lazy in (False, True)}
        gave_up = {lazy: sum(len(messages) == 2 for messages in drawn[lazy]) / 500 for lazy in drawn}
        assert gave_up[False] < 0.15 and 0.5 < gave_up[True] < 0.7


def test_every_word_is_one_token_and_the_tools_are_those_of_the_agents() -> None:
    assert client.SEARCH_TOOLS == [lessons.SEARCH_TOOL] and team_agent.ASK_TOOLS == [lessons.ASK_SEARCHER_TOOL]
    tokenizer = make_start.make_tokenizer()
    words = [*facts.NAMES, *facts.VALUES, *(value for values in facts.VALUES.values() for value in values)]
    assert {len(tokenizer.tokenize(text)) for word in words for text in (word, " " + word)} == {1}
    longest = {lessons.searcher_lesson: (16, 64), lessons.main_lesson: (36, 96)}
    for lesson, (turn, whole) in longest.items():
        messages, tools = next(
            drawn for i in range(99) if len((drawn := lesson(random.Random(i), KNOWN, lazy=False))[0]) > 3
        )
        ids, learn = make_start.encode(tokenizer, (messages, tools))
        assert len(ids) <= whole and sum(learn) <= turn + 4


# ---- the search service


@pytest.fixture(scope="module")
def index() -> search_service.Index:
    return search_service.Index(CORPUS)


def test_a_good_query_finds_its_fact_first_and_a_name_alone_mostly_does_not(index: search_service.Index) -> None:
    queries = [facts.query(fact) for fact in REGISTRY]
    texts = [document["text"] for document in CORPUS]
    assert [hits[0]["text"] for hits in index.search(queries, 1)] == texts
    by_name = index.search([fact.name for fact in REGISTRY], 1)
    assert sum(hits[0]["text"] == text for hits, text in zip(by_name, texts, strict=True)) == len(facts.NAMES)
    assert index.search(["zzz", "", "the of"], 3) == [[], [], []], "no word shared, nothing found"
    many = index.search([facts.NAMES[0]], 1000)[0]
    assert len(many) == len(facts.VALUES), "no more than share a word"
    assert [hit["score"] for hit in many] == sorted((hit["score"] for hit in many), reverse=True)


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in CORPUS))
    return path


@pytest.fixture(scope="module")
def service(corpus_file: Path) -> Iterator[str]:
    """The address of a service that runs as a process of its own, and ends by itself when its parent is killed."""
    ready = corpus_file.with_name("url")
    command = f'"$0" "$1" --corpus "$2" --ready-file "{ready}" --stop-with-parent & wait'
    arguments = [sys.executable, SEARCH / "search_service.py", corpus_file]
    with subprocess.Popen(["bash", "-c", command, *arguments], stdout=subprocess.DEVNULL) as parent:
        url = wait_for(lambda: ready.read_text().strip() if ready.exists() else None)
        yield url
        parent.kill()
    wait_for(lambda: not answers(url))


def answers(url: str) -> bool:
    try:
        client.JsonClient(url)
    except ConnectionRefusedError:
        return False
    return True


def wait_for(look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (seen := look()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return seen


def test_the_service_answers_batches_and_says_what_is_wrong_with_others(service: str) -> None:
    http = client.JsonClient(service)
    fact = REGISTRY[7]
    found = http.post("/search", {"queries": [facts.query(fact), "zzz"], "top_k": 2})["results"]
    assert found[0][0]["text"] == CORPUS[7]["text"] and found[0][0]["id"] == 7 and len(found[0]) == 2
    assert found[1] == []
    for body, word in (
        ({"queries": "pet"}, "queries"),
        ({"queries": []}, "1 to 256"),
        ({"queries": ["pet", 3]}, "queries"),
        ({"queries": ["pet"], "top_k": True}, "top_k"),
        ([], "queries"),
    ):
        with pytest.raises(client.ServiceError, match=f"400.*{word}"):
            http.post("/search", body)
    assert http.post("/search", {"queries": ["pet"]})["results"][0], "a refusal ends no connection"


def test_a_broken_corpus_is_refused_by_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.jsonl").write_text('{"id": 1, "text": "a fact"}\n{"id": 2}\n')
    assert search_service.main(["--corpus", str(tmp_path / "c.jsonl")]) == 2
    assert "c.jsonl:2" in capsys.readouterr().err


# ---- credit


def slot(outcome: float, *usefulness: float) -> dict[str | None, Json]:
    searchers = {
        f"searcher_{i}": {"role": "searcher", "usefulness": u, "outcome": outcome} for i, u in enumerate(usefulness)
    }
    return {"main": {"role": "main", "outcome": outcome}, **searchers}


def test_credit_compares_each_role_with_itself() -> None:
    group = [slot(1.0, 1.0, 1.0), slot(0.0, 1.0, 0.0), slot(0.0), slot(0.0, 0.0)]
    # mains: mean 1/4. Searchers: worth 1, 1, 1/2, 0, 0, mean 1/2.
    assert advantage.advantage_func(group) == [
        {"main": 0.75, "searcher_0": 0.5, "searcher_1": 0.5},
        {"main": -0.25, "searcher_0": 0.0, "searcher_1": -0.5},
        {"main": -0.25},
        {"main": -0.25, "searcher_0": -0.5},
    ]
    assert advantage.advantage_func([slot(1.0, 1.0)]) == [{"main": 0.0, "searcher_0": 0.0}]
    assert advantage.advantage_func([slot(0.0), slot(0.0)]) == [{"main": 0.0}, {"main": 0.0}]


# ---- agents


class TeamModel:
    """A Chat Completions server that answers by what it is asked: from the request to the assistant message."""

    def __init__(self, answer: Callable[[Json], Json]):
        self.answer = answer
        self.bodies: list[Json] = []
        self.keys: set[str | None] = set()
        self.url = ""


@contextmanager
def serving(model: TeamModel) -> Iterator[TeamModel]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            model.bodies.append(body)
            model.keys.add(self.headers["Authorization"])
            reply = json.dumps({"choices": [{"index": 0, "message": model.answer(body)}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    model.url = f"http://127.0.0.1:{server.server_port}/agentic_api"
    try:
        yield model
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def play(
    agent: str, model: TeamModel, service: str, folder: Path, row: Json, mode: str = "train"
) -> tuple[list[Json], str]:
    """The documents that one agent process wrote, and what it printed as an error."""
    (folder / "input.json").write_text(json.dumps({"messages": row["input"], "metadata": row["metadata"]}))
    env = {
        "RELAX_INPUT_JSON": f"{folder}/input.json",
        "RELAX_OUTPUT_JSON": f"{folder}/output",
        "RELAX_BASE_URL": model.url,
        "RELAX_SESSION_ID": "session-1",
        "RELAX_ROLLOUT_MODE": mode,
        "SEARCH_URL": service,
    }
    done = subprocess.run([sys.executable, "-I", "-S", SEARCH / agent], env=env, capture_output=True, text=True)
    output = folder / "output"
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else [], done.stderr


def say(text: str) -> Json:
    return {"role": "assistant", "content": text}


def call(name: str, *arguments: str) -> Json:
    functions = [{"name": name, "arguments": text} for text in arguments]
    calls = [{"id": f"call_{i}", "type": "function", "function": function} for i, function in enumerate(functions)]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def searches(body: Json) -> Json:
    """Searches for what it is asked, then says the document's last word but for "as ..." (a searcher that can read)."""
    if len(body["messages"]) == 1:
        ((name, attribute),) = asked_about(body["messages"][0]["content"])
        return call("search", json.dumps({"query": f"{name} {attribute}"}))
    words = body["messages"][-1]["content"].rstrip(".").split()
    return say(words[-1] if words[0] == "The" else words[2])


def works_as_a_team(body: Json) -> Json:
    if body["tools"] == client.SEARCH_TOOLS:
        return searches(body)
    if len(body["messages"]) == 1:
        asked = asked_about(body["messages"][0]["content"])
        return call("ask_searcher", *(json.dumps({"question": f"{attribute} of {name}?"}) for name, attribute in asked))
    return say(" and ".join(m["content"] for m in body["messages"] if m["role"] == "tool"))


@pytest.mark.parametrize(
    ("answer", "reward", "results"),
    [
        (searches, 1.0, [CORPUS[9]["text"]]),
        (lambda body: say("unknown"), 0.0, []),
        (lambda body: call("search", '{"query": ', "[1]", '{"query": "zzz"}'), 0.0, [client.NOTHING_FOUND] * 6),
    ],
)
def test_the_single_agent_searches_reads_and_scores(
    answer: Callable[[Json], Json], reward: float, results: list[str], service: str, tmp_path: Path
) -> None:
    row = facts.single_row(REGISTRY[9], facts.TRAIN_PHRASINGS[0])
    with serving(TeamModel(answer)) as model:
        (output,), error = play("search_agent.py", model, service, tmp_path, row)
    assert error == "" and output["reward"] == reward
    assert output["metadata"] == {"searched": float(bool(results)), "found": reward}
    assert [m["content"] for m in model.bodies[-1]["messages"] if m["role"] == "tool"] == results
    assert model.keys == {"Bearer session-1"}


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_team_delegates_side_by_side_and_writes_each_conversation_down(
    mode: str, service: str, tmp_path: Path
) -> None:
    both = threading.Barrier(2)

    def answer(body: Json) -> Json:
        if body["tools"] == client.SEARCH_TOOLS and len(body["messages"]) == 1:
            both.wait(30)  # each searcher's first request is answered only once both are there
        return works_as_a_team(body)

    first, second = REGISTRY[3], REGISTRY[100]
    with serving(TeamModel(answer)) as model:
        records, error = play(
            "team_agent.py", model, service, tmp_path, facts.team_row(first, second, "{first} and {second}?"), mode
        )
    assert error == "" and model.keys == {"Bearer session-1"}
    assert [record["name"] for record in records] == ["main", "searcher_0", "searcher_1"][: 3 if mode == "train" else 1]
    main = records[0]
    assert main["reward"] == 1.0 and main["metadata"] == {"role": "main", "outcome": 1.0, "num_asked": 2}
    assert main["messages"][-1] == say(f"{first.value} and {second.value}")
    for record, fact in zip(records[1:], (first, second), strict=False):
        assert "reward" not in record
        assert record["metadata"] == {"role": "searcher", "outcome": 1.0, "usefulness": 1.0}
        assert record["messages"][0] == {"role": "user", "content": f"{fact.attribute} of {fact.name}?"}
    # Each record is what a request held and what it was answered: nothing less, nothing behind it.
    sent = [(body["messages"], body["tools"]) for body in model.bodies]
    assert all((record["messages"][:-1], record["tools"]) in sent for record in records)


def test_a_team_that_asks_too_much_or_nonsense_hears_so_and_keeps_what_was_said(service: str, tmp_path: Path) -> None:
    def answer(body: Json) -> Json:
        if body["tools"] == client.SEARCH_TOOLS:
            return say("")
        return call("ask_searcher", *[json.dumps({"question": text}) for text in (" ", "pet?", "who?", "why?")])

    with serving(TeamModel(answer)) as model:
        row = facts.team_row(REGISTRY[3], REGISTRY[100], "{first} and {second}?")
        records, error = play("team_agent.py", model, service, tmp_path, row)
    assert error == "" and [record["name"] for record in records] == ["main", "searcher_0", "searcher_1"]
    heard = [m["content"] for m in records[0]["messages"] if m["role"] == "tool"]
    first = [team_agent.NO_QUESTION, team_agent.NO_ANSWER, team_agent.NO_ANSWER, team_agent.NOBODY_FREE]
    assert heard == first + [team_agent.NO_QUESTION] + [team_agent.NOBODY_FREE] * 3
    assert records[0]["messages"][-1]["role"] == "assistant", "calls that nobody answered any more end the record"
    assert [record["metadata"]["usefulness"] for record in records[1:]] == [0.0, 0.0]


def test_a_team_whose_searcher_breaks_off_ends_with_an_error_and_no_records(tmp_path: Path) -> None:
    with serving(TeamModel(works_as_a_team)) as model:
        row = facts.team_row(REGISTRY[3], REGISTRY[100], "{first} and {second}?")
        records, error = play("team_agent.py", model, "http://127.0.0.1:9", tmp_path, row)
    assert records == [] and "ConnectionRefused" in error and "a searcher broke off" in error


# ---- the whole: script, service, agents and Silva


@pytest.mark.slow
def test_the_script_runs_the_team_against_its_service_and_stops_it(corpus_file: Path, tmp_path: Path) -> None:
    """A scripted model: main asks twice, each searcher answers at once, main puts the answers together."""
    start_model.save_tokenizer(make_start.make_tokenizer(), tmp_path / "model")
    asked = "".join(
        f'<tool_call>\n{{"name": "ask_searcher", "arguments": {{"question": "pet of {name}?"}}}}\n</tool_call>\n'
        for name in facts.NAMES[:2]
    )
    lines = [asked.strip(), "owl", "owl", "owl and owl"]
    (tmp_path / "script.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    row = {"input": [{"role": "user", "content": "?"}], "metadata": {"answers": ["owl", "owl"]}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    options = {
        "engine": "scripted",
        "engine-script": tmp_path / "script.jsonl",
        "hf-checkpoint": tmp_path / "model",
        "prompt-data": tmp_path / "rows.jsonl",
        "run-dir": tmp_path / "run",
        "rollout-batch-size": 1,
        "n-samples-per-prompt": 2,
        "num-rollout": 1,
    }
    command = ["bash", SEARCH / "run.sh", SEARCH / "team.toml"]
    command += [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "SILVA_COMMAND": "rollout", "SEARCH_CORPUS": str(corpus_file)}
    done = subprocess.run(command, env=env, cwd=SEARCH.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    url = done.stdout.split("ready url=")[1].split()[0]
    assert not answers(url)
    shown = show(tmp_path / "run", show(tmp_path / "run")["sessions"][0]["session_id"])
    assert [(sample["name"], sample["reward"]) for sample in shown["samples"]] == [
        ("main", 1.0),
        ("searcher_0", None),
        ("searcher_1", None),
    ]
    assert [sample["metadata"]["role"] for sample in shown["samples"]] == ["main", "searcher", "searcher"]
