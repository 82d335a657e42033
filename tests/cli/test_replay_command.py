"""`silva check --replay`: recordings of real exchanges, and of clients that leave their history."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from silva_command import eventually, run_silva, running_silva, stop, write_script

from silva.cli.main import main

PARSERS = ("--agentic-tool-call-parser", "auto", "--agentic-reasoning-parser", "auto")
CALL = '<think>\nhm\n</think>\n\nI look\n<tool_call>\n{"name": "f", "arguments": {"a": 1.0}}\n</tool_call>'


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def replayed(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, dict[str, Any]]:
    status = main(["check", "--replay", *map(str, args), "--json"])
    return status, json.loads(capsys.readouterr().out)


def claude(nonce: str, messages: list[Any], **more: Any) -> dict[str, Any]:
    """A request of Claude Code as a proxy saw it."""
    header = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={nonce};"
    system = [{"type": "text", "text": header}, {"type": "text", "text": "You are."}]
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    body = {"model": "m", "max_tokens": 3, "stream": True, "system": system, "tools": tools, "messages": messages}
    return {"method": "POST", "path": "https://x.example/v1/messages?beta=true", "body": body, **more}


def three_turns() -> list[dict[str, Any]]:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    said = [{"type": "text", "text": "I look"}, {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}]
    first = [{"role": "user", "content": "q"}]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "r"}]}
    second = [*first, {"role": "assistant", "content": [thought, *said]}, result]
    tail = [{"role": "assistant", "content": "done, I think"}, {"role": "user", "content": "more"}]
    third = [*first, {"role": "assistant", "content": said}, result, *tail]
    return [claude("1", first), claude("2", second), claude("3", third)]


@pytest.mark.slow
def test_what_serve_records_replays_as_it_was(tmp_path: Path, chatml_dir: Path, capsys: pytest.CaptureFixture[str]):
    write_script(tmp_path / "script.jsonl", {"text": CALL}, {"text": " done "})
    serve = ("serve", "--open-sessions", "--run-dir", "run", "--engine", "scripted", "--engine-script", "script.jsonl")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    flat = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    with running_silva(*serve, *PARSERS, "--hf-checkpoint", chatml_dir, "--record", "rec", cwd=tmp_path) as process:
        base = eventually(lambda: re.search(r"ready base_url=(\S+)", (tmp_path / "stdout").read_text())).group(1)

        def post(session: str, path: str, body: Any) -> str:
            answer = httpx.post(f"{base}/v1/{path}", json=body, headers={"x-api-key": session})
            assert answer.status_code == 200, answer.text
            return answer.text

        chat: list[Any] = [{"role": "user", "content": "q"}]
        for stream in (False, True):
            text = post("chat", "chat/completions", {"messages": chat, "tools": [tool], "stream": stream})
            if not stream:
                message = json.loads(text)["choices"][0]["message"]
                del message["reasoning"], message["reasoning_content"]
                chat += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "r"}]
        items: list[Any] = [{"role": "user", "content": "q"}]
        for stream in (False, True):
            text = post("responses", "responses", {"input": items, "tools": [flat], "stream": stream})
            if not stream:
                output = json.loads(text)["output"]
                items += [{"type": "item_reference", "id": item["id"]} for item in output]
                items.append({"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "r"})
        post("messages", "messages", {"max_tokens": 99, "stream": True, "messages": [{"role": "user", "content": "q"}]})
        httpx.get(f"{base}/v1/models")
        assert stop(process, signal.SIGTERM) == 0
    assert (tmp_path / "rec").stat().st_mode & 0o077 == 0
    status, doc = replayed(capsys, tmp_path / "rec", "--hf-checkpoint", chatml_dir, *PARSERS)
    assert status == 0 and doc["linear"], json.dumps([s for s in doc["sessions"] if not s["linear"]], indent=1)
    seen = {session["session"]: session for session in doc["sessions"]}
    assert set(seen) == {"chat", "responses", "messages"}
    assert [turn["repairs"] for turn in seen["chat"]["requests"]] == [[], ["reasoning_missing"]]
    assert [turn["repairs"] for turn in seen["responses"]["requests"]] == [[], []]
    assert all(turn["answer"] == "as recorded" for session in doc["sessions"] for turn in session["requests"])


@pytest.mark.slow
def test_a_recorded_client_is_told_what_forks_and_what_helps(
    tmp_path: Path, chatml_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = write(tmp_path / "rec.jsonl", *three_turns(), {"method": "GET", "path": "/v1/models"})
    options = ("--hf-checkpoint", chatml_dir, *PARSERS)
    done = run_silva("check", "--replay", recording, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "+reasoning_missing" in done.stdout and "1 other requests" in done.stdout
    assert main(["check", "--replay", *map(str, (recording, *options)), "--agentic-profiles", "none"]) == 1
    told = capsys.readouterr().out
    assert "line 2  messages  root" in told and "leaves the known history at /system/content" in told
    assert "3 root(s), 3 leaf/leaves" in told
    assert "linear with: --agentic-profiles claude-code-billing@1\n" in told
    assert "CLAUDE_CODE_ATTRIBUTION_HEADER=0" in told


@pytest.mark.slow
def test_settings_are_tried_until_one_is_linear(tmp_path: Path, chatml_dir: Path, capsys: pytest.CaptureFixture[str]):
    recording = write(tmp_path / "rec.jsonl", *three_turns())
    options = ("--hf-checkpoint", chatml_dir)
    status, doc = replayed(capsys, recording, *options, *PARSERS, "--agentic-echo-match", "exact")
    (session,) = doc["sessions"]
    assert status == 1 and session["linear_with"] == ["--agentic-echo-match lenient"]
    assert session["requests"][2]["difference"]["pointer"] == "/messages/1/reasoning_content"
    status, doc = replayed(capsys, recording, *options)
    assert status == 1 and doc["sessions"][0]["linear_with"] == [
        "--agentic-tool-call-parser auto --agentic-reasoning-parser auto"
    ]


def test_an_edited_history_and_a_side_call_have_no_remedy(
    tmp_path: Path, chatml_dir: Path, capsys: pytest.CaptureFixture[str]
):
    edited = json.loads(json.dumps(three_turns()))  # the turns share their messages
    edited[2]["body"]["messages"][0]["content"] = "q, edited"
    side = claude("9", [{"role": "user", "content": "a title, please"}], session="side")
    rest = [{**line, "session": "side"} for line in three_turns()]
    recording = write(tmp_path / "rec.jsonl", *edited, rest[0], side, *rest[1:])
    status, doc = replayed(capsys, recording, "--hf-checkpoint", chatml_dir, *PARSERS)
    first, second = doc["sessions"]
    assert status == 1 and first["linear_with"] == second["linear_with"] == []
    assert first["requests"][2]["difference"] == {"pointer": "/messages/0/content", "old": "q", "new": "q, edited"}
    assert [turn["match"] for turn in second["requests"]] == ["root", "root", "append", "append"]
    assert (second["num_roots"], second["num_leaves"]) == (2, 2)


def test_a_repeated_request_joins_as_it_did_and_headers_of_any_kind_do_no_harm(
    tmp_path: Path, chatml_dir: Path, capsys: pytest.CaptureFixture[str]
):
    first: list[Any] = [{"role": "user", "content": "q"}]
    second = [*first, {"role": "assistant", "content": "a"}, *first]
    odd = {"Idempotency-Key": "k" * 100_000, "x-stainless-retry-count": "\r\nx: y\ud800", "user-agent": 7}
    lines = [
        claude("1", first, headers={"X-Stainless-Retry-Count": "0"}),
        claude("2", first, headers=[["X-Stainless-Retry-Count", "1"], ["idempotency-key", "\u2713"], [1]]),
        claude("3", second, headers=odd),
    ]
    recording = write(tmp_path / "rec", *lines)
    status, found = replayed(capsys, recording, "--hf-checkpoint", chatml_dir)
    (session,) = found["sessions"]
    assert [turn["match"] for turn in session["requests"]] == ["root", "join", "append"]
    assert status == 0 and session["linear"]


def test_a_broken_recording_is_refused_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = three_turns()[0]
    bad = [
        "{",
        "[1]",
        {"path": "/v1/messages", "body": {}},
        {**good, "body": 7},
        {**good, "session": ""},
        {**good, "response": {"content": [{"type": "tool_use"}]}},
        {**good, "response": "data: none"},
        {**good, "response": {"content": 10**400}},
        "[" * 100000,
    ]
    recording = write(tmp_path / "rec.jsonl", good, *bad)
    assert main(["check", "--replay", str(recording), "--hf-checkpoint", "nowhere"]) == 2
    told = capsys.readouterr().err
    for number in range(2, 11):
        assert f"line {number}: " in told
    assert "9 bad line(s)" in told and "Traceback" not in told
    write(recording, {"method": "GET", "path": "/v1/models"})
    assert main(["check", "--replay", str(recording), "--hf-checkpoint", "nowhere"]) == 2
    assert "no model request" in capsys.readouterr().err
    assert main(["check", "--json"]) == 2


def test_a_body_that_the_gateway_refuses_is_told(tmp_path: Path, chatml_dir: Path, capsys: pytest.CaptureFixture[str]):
    broken = {"method": "POST", "path": "/chat/completions", "body": '{"messages": '}
    deep = {**broken, "body": '{"messages": ' + "[" * 5000 + "]" * 5000 + "}"}
    status, doc = replayed(capsys, write(tmp_path / "rec", broken, deep), "--hf-checkpoint", chatml_dir)
    assert status == 1
    assert [turn["http_status"] for turn in doc["sessions"][0]["requests"]] == [400, 400]
    assert all(turn["error"] for turn in doc["sessions"][0]["requests"])
