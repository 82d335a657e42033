"""`silva explain` on a run that `silva serve` wrote: what people read about a history that was left."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import httpx
import pytest
from silva_command import eventually, in_process, run_silva, running_silva, show, stop, write_script


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lenient", "exact"])
def test_explain_names_node_field_and_values(tmp_path: Path, chatml_dir: Path, mode: str) -> None:
    write_script(tmp_path / "script.jsonl", {"text": " one "}, {"text": "two"}, {"text": "three"})
    command = (
        "serve",
        "--open-sessions",
        "--run-dir",
        "run",
        "--engine",
        "scripted",
        "--engine-script",
        "script.jsonl",
    )
    profiles = "auto" if mode == "lenient" else "none"
    options = ("--hf-checkpoint", chatml_dir, "--agentic-echo-match", mode, "--agentic-profiles", profiles)
    with running_silva(*command, *options, cwd=tmp_path) as process:
        base = eventually(lambda: re.search(r"ready base_url=(\S+)", (tmp_path / "stdout").read_text())).group(1)

        def ask(*texts: str) -> None:
            roles = ("user", "assistant")
            messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
            post("s", messages)

        def post(session: str, messages: list[dict[str, str]]) -> None:
            headers = {"authorization": f"Bearer {session}"}
            httpx.post(f"{base}/v1/chat/completions", json={"messages": messages}, headers=headers).raise_for_status()

        ask("hi")
        ask("hi", "one", "go")
        ask("hi", "one \x1b[2J", "go on")
        for nonce in "12":
            noise = f"x-anthropic-billing-header: cc_version=2; cch={nonce};You help."
            post("noisy", [{"role": "system", "content": noise}, {"role": "user", "content": nonce}])
        httpx.post(f"{base}/sessions/s/finish").raise_for_status()
        httpx.post(f"{base}/sessions/noisy/finish").raise_for_status()
        assert stop(process, signal.SIGTERM) == 0
    first, second, third = show(tmp_path / "run", "s")["requests"]
    assert first["difference"] is None
    assert (second["repairs"], second["match"]) == ((["blanks"], "append") if mode == "lenient" else ([], "branch"))
    assert third["difference"]["pointer"] == "/messages/1/content"
    done = run_silva("explain", "run", "s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        f"request {third['request_id']} branched off from node 1 (its answer is node {third['node_id']})" in done.stdout
    )
    assert "first difference at /messages/1/content\n" in done.stdout
    assert "\x1b" not in done.stdout
    assert ("outer blanks of a text were lost" in done.stdout) == (mode == "lenient")
    assert (f"\nrequest {second['request_id']}" in done.stdout) == (mode == "exact")
    assert "failed (not_linear)  3 requests\nerror\n    the session's history is not linear" in done.stdout
    noisy = in_process("explain", tmp_path / "run", "noisy")
    assert noisy.returncode == 0 and "the history has 2 roots" in noisy.stdout
    if mode == "lenient":
        assert "2 x profile:claude-code-billing@1: " in noisy.stdout and "--agentic-profiles" not in noisy.stdout
        assert "first difference at /messages/1/content" in noisy.stdout
    else:
        assert "first difference at /messages/0/content" in noisy.stdout
        assert "with --agentic-profiles claude-code-billing@1 it would be the same text" in noisy.stdout
    wrong = in_process("explain", tmp_path / "run", "t")
    assert wrong.returncode == 1 and "'t'" in wrong.stderr
