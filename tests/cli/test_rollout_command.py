"""`silva rollout` and `silva show`, with real agents against a scripted engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from silva_command import AGENT, TWO_TURNS, in_process, marked_processes, run_silva, show, write_rows, write_script

from silva.store.queries import check_ledgers, open_run


def rollout(
    tmp_path: Path, tokenizer: Path, agent: str, *more: object, rows: int = 4, script: list[dict] | None = None
):
    (tmp_path / "agent.py").write_text(agent)
    write_rows(tmp_path / "rows.jsonl", rows)
    write_script(tmp_path / "script.jsonl", *(script or [{"text": "hello world"}]))
    return run_silva(
        "rollout",
        *("--use-agentic-rollout", "--agent-command", "exec python3 -I agent.py", "--agent-retries", 0),
        *("--prompt-data", "rows.jsonl", "--rollout-batch-size", rows, "--num-rollout", 1, "--run-dir", "run"),
        *("--engine", "scripted", "--engine-script", "script.jsonl", "--hf-checkpoint", tokenizer),
        *more,
        cwd=tmp_path,
    )


@pytest.fixture(scope="module")
def two_turns(tmp_path_factory: pytest.TempPathFactory, chatml_dir: Path) -> Path:
    """The folder of one good run, which tests only read."""
    folder = tmp_path_factory.mktemp("two_turns")
    done = rollout(folder, chatml_dir, TWO_TURNS, "--engine-log", "engine.jsonl")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_samples_are_the_tokens_that_the_engine_saw_and_gave(two_turns: Path) -> None:
    tmp_path = two_turns
    assert "AGENTIC ROLLOUT event=accounting_end rollout=0 prompts=4 " in (tmp_path / "run" / "run.log").read_text()
    calls = [json.loads(line) for line in (tmp_path / "engine.jsonl").read_text().splitlines()]
    document = show(tmp_path / "run")
    assert document["counts"]["sessions"] == {"exported": {"none": 4}}
    assert document["counts"]["prompts"] == {"delivered": {"none": 4}}
    for item in document["sessions"]:
        sample = show(tmp_path / "run", item["session_id"])["samples"][0]
        mine = [call["input_ids"] for call in calls if call["session_id"] == item["session_id"]]
        assert len(mine) == 2
        for input_ids in mine:
            assert sample["token_ids"][: len(input_ids)] == input_ids
        assert len(sample["token_ids"]) == len(sample["loss_mask"]) == len(sample["logprobs"])
    lines = (tmp_path / "run" / "samples" / "0.jsonl").read_text().splitlines()
    assert {json.loads(line)["status"] for line in lines} == {"exported"}


def test_text_view_of_run_and_session(two_turns: Path) -> None:
    text = run_silva("show", "run", cwd=two_turns).stdout
    session_id = show(two_turns / "run")["sessions"][0]["session_id"]
    assert session_id in text
    session = in_process("show", two_turns / "run", session_id).stdout
    assert "hello world" in session and "reward 1.25" in session
    wrong = run_silva("show", "run", session_id[:-1] + "0z", cwd=two_turns)
    assert wrong.returncode == 1 and session_id in wrong.stderr
    nothing = in_process("show", two_turns / "nowhere")
    assert nothing.returncode == 1 and "nowhere" in nothing.stderr


HOSTILE = (
    AGENT
    + """
if n == 0: sys.exit(1)
if n == 1: open(os.environ["RELAX_OUTPUT_JSON"], "w").write('{"reward": '); ask(messages); sys.exit(0)
if n == 2: ask(messages); open(os.environ["RELAX_OUTPUT_JSON"], "w").write('{"reward": NaN}'); sys.exit(0)
if n == 3: print("swallowed my own crash", flush=True); sys.exit(0)
if n == 4:
    import subprocess
    subprocess.Popen(["setsid", "sleep", "600"]); subprocess.Popen(["sleep", "600"])
    ask(messages); give({"reward": 1.0}); sys.exit(0)
if n == 5:
    ask([{"role": "user", "content": "x" * 10_000_000}])
if n == 6:
    try:
        post(b'{"messages": "\\xff\\xfe"}')
    except HTTPError as error:
        assert error.code == 400, error.code
    ask(messages); give({"reward": 0.5}); sys.exit(0)
if n == 7: ask(messages); ask(messages); give({"reward": 1.0}); sys.exit(0)
if n == 8: ask(messages); give({"messages": messages, "name": "main", "reward": 1.0}); sys.exit(0)
if n == 9: ask(messages); give({"metadata": {"x": 1}}); sys.exit(0)
if n == 12:
    try:
        ask([])
    except HTTPError:
        sys.exit(0)
if n == 10: print("last words", flush=True); os.kill(os.getpid(), 9)
ask(messages); give({"reward": 1.0})
"""
)


@pytest.mark.slow
def test_hostile_agents_are_all_accounted_for(tmp_path: Path, chatml_dir: Path) -> None:
    done = rollout(tmp_path, chatml_dir, HOSTILE, rows=13)
    assert done.returncode == 0, done.stderr
    document = show(tmp_path / "run")
    reasons, ids = {}, {}
    for item in document["sessions"]:
        n = json.loads((tmp_path / "run/sessions" / item["session_id"] / "input.json").read_text())["metadata"]["n"]
        reasons[n], ids[n] = item["reason"] or item["status"], item["session_id"]
    assert reasons == {
        0: "agent_exit",
        1: "output_invalid",
        2: "reward_invalid",
        3: "no_response",
        4: "exported",
        5: "agent_exit",
        6: "exported",
        7: "not_linear",
        8: "record_unmatched",
        9: "reward_missing",
        10: "agent_exit",
        11: "exported",
        12: "no_response",
    }
    assert document["counts"]["prompts"] == {"delivered": {"none": 3}, "dropped": {"all_sessions_failed": 10}}
    assert (
        "step 0: 10 of 13 sessions failed (agent_exit 3, no_response 2, not_linear 1, output_invalid 1," in done.stderr
    )
    text = in_process("show", tmp_path / "run").stdout
    for reason in set(reasons.values()) - {"exported"}:
        first = next(item["session_id"] for item in document["sessions"] if item["reason"] == reason)
        assert f"\nthe first {reason}: session {first}\n    " in text
    assert "    the output file cannot be used: it is not valid JSON at line 1 column 12" in text
    assert "last words" in done.stderr and "HTTP Error 400" in done.stderr
    assert "swallowed my own crash" in done.stderr and "it sent no request under its key" in done.stderr
    assert "the agent ended with exit status 1; its last model request ended with 400 context_length" in done.stderr
    assert "none of its 1 request(s) got one, the last ended with 400 empty_messages" in done.stderr
    assert show(tmp_path / "run", ids[5])["requests"][0]["error_code"] == "context_length_exceeded"
    assert marked_processes(tmp_path / "run") == []
    with open_run(tmp_path / "run") as conn:
        check_ledgers(conn, finished=True)


@pytest.mark.slow
def test_a_run_in_which_every_agent_fails_stops_with_the_first_log(tmp_path: Path, chatml_dir: Path) -> None:
    done = rollout(tmp_path, chatml_dir, "import sys; print('no module named tools'); sys.exit(7)", rows=3)
    assert done.returncode == 1
    told = done.stderr[done.stderr.index("silva rollout: error:") :]
    assert "exit status 7" in told and "no module named tools" in told
    assert marked_processes(tmp_path / "run") == []


@pytest.mark.slow
def test_an_agent_that_keeps_killing_the_runner_stops_the_run(tmp_path: Path, chatml_dir: Path) -> None:
    done = rollout(tmp_path, chatml_dir, "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(600)", rows=1)
    assert done.returncode == 1, done.stderr
    assert "silva rollout: error: the process that owns the agents" in done.stderr and "Traceback" not in done.stderr
    counts = show(tmp_path / "run")["counts"]
    assert counts["sessions"] == {"cancelled": {"run_stopped": 1}, "failed": {"runner_lost": 5}}
    assert counts["prompts"] == {"pending": {"none": 1}}
    assert marked_processes(tmp_path / "run") == []


@pytest.mark.slow
def test_failures_in_a_row_stop_the_run(tmp_path: Path, chatml_dir: Path) -> None:
    done = rollout(
        tmp_path, chatml_dir, "raise SystemExit(7)", "--agent-max-failures", 3, "--agentic-concurrency", 1, rows=20
    )
    assert done.returncode == 1 and "3 sessions failed in a row (--agent-max-failures 3)\n" in done.stderr
    told = done.stderr[done.stderr.index("silva rollout: error:") :]
    assert "Failed sessions since the last good one, by reason: agent_exit 3\nThe first: session g-train-0-" in told
    assert f"Look closer with: silva show {tmp_path / 'run'} g-train-0-" in told
    counts = show(tmp_path / "run")["counts"]
    assert counts["sessions"] == {"failed": {"agent_exit": 3}}
    assert counts["prompts"] == {"dropped": {"all_sessions_failed": 2}, "pending": {"none": 1}}


@pytest.mark.slow
def test_a_failed_session_is_retried_in_its_slot(tmp_path: Path, chatml_dir: Path) -> None:
    flaky = AGENT + (
        "mark = f'seen-{n}'\n"
        "if not os.path.exists(mark): open(mark, 'w').close(); sys.exit(9)\n"
        "ask(messages); give({'reward': float(os.environ['POINTS'])})\n"
    )
    done = rollout(tmp_path, chatml_dir, flaky, "--agent-retries", 1, "--agent-env", "POINTS=0.25", rows=2)
    assert done.returncode == 0, done.stderr
    counts = show(tmp_path / "run")["counts"]
    assert counts["sessions"] == {"exported": {"none": 2}, "failed": {"agent_exit": 2}}
    assert counts["prompts"] == {"delivered": {"none": 2}}
    assert {item["reward"] for item in show(tmp_path / "run")["sessions"]} == {0.25, None}


@pytest.mark.slow
def test_a_group_keeps_its_survivors_while_enough_are_left(tmp_path: Path, chatml_dir: Path) -> None:
    lots = AGENT + (
        "import glob\n"
        "mine = len(glob.glob(f'go-{n}-*')); open(f'go-{n}-{os.getpid()}', 'w').close()\n"
        "ask(messages)\n"
        "os.link(os.environ['RELAX_INPUT_JSON'], f'first-{n}') if not os.path.exists(f'first-{n}') else sys.exit(4)\n"
        "give({'reward': 1.0})\n"
    )
    done = rollout(tmp_path, chatml_dir, lots, "--n-samples-per-prompt", 3, rows=2)
    assert done.returncode == 1 and "1 of 3 sessions are left" in done.stderr
    assert show(tmp_path / "run")["counts"]["prompts"] == {"dropped": {"group_too_small": 2}}
    for stale in tmp_path.glob("first-*"):
        stale.unlink()
    done = rollout(
        tmp_path,
        chatml_dir,
        lots,
        "--n-samples-per-prompt",
        3,
        "--agentic-min-group-size",
        1,
        "--run-dir",
        "two",
        rows=2,
    )
    assert done.returncode == 0, done.stderr
    counts = show(tmp_path / "two")["counts"]
    assert counts["prompts"] == {"delivered": {"none": 2}}
    assert counts["sessions"]["exported"] == {"none": 2}


@pytest.mark.slow
def test_each_row_is_used_once(tmp_path: Path, chatml_dir: Path) -> None:
    done = rollout(
        tmp_path, chatml_dir, TWO_TURNS, "--rollout-batch-size", 3, "--num-rollout", 9, "--rollout-shuffle", rows=7
    )
    assert done.returncode == 0, done.stderr
    assert show(tmp_path / "run")["counts"]["prompts"] == {"delivered": {"none": 7}}
    assert sorted(path.name for path in (tmp_path / "run/samples").iterdir()) == ["0.jsonl", "1.jsonl", "2.jsonl"]


@pytest.mark.slow
def test_metadata_only_rows_and_agent_env(tmp_path: Path, chatml_dir: Path) -> None:
    agent = AGENT + "ask(messages); give({'reward': float(os.environ['POINTS']), 'metadata': task['metadata']})\n"
    (tmp_path / "agent.py").write_text(agent)
    write_script(tmp_path / "script.jsonl", {"text": "hello world"})
    (tmp_path / "rows.jsonl").write_text('{"metadata": {"n": 5, "tag": "ü"}}\n')
    done = run_silva(
        *("rollout", "--use-agentic-rollout", "--agent-command", "exec python3 -I agent.py", "--agent-env-clear"),
        *("--agent-env", "POINTS=0.25", "--prompt-data", "rows.jsonl", "--rollout-batch-size", 1, "--num-epoch", 2),
        *("--run-dir", "run", "--engine", "scripted", "--engine-script", "script.jsonl", "--hf-checkpoint", chatml_dir),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    sessions = show(tmp_path / "run")["sessions"]
    assert [item["reward"] for item in sessions] == [0.25, 0.25]
    assert show(tmp_path / "run", sessions[0]["session_id"])["metadata"] == {"n": 5, "tag": "ü"}
