"""`silva reexport`: a recorded run under other options, by real agents once and from the ledger after that."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from silva_command import AGENT, run_silva

from silva.cli.main import main
from silva.config.options import RunConfig
from silva.config.parse import write_config_file
from silva.store.ledger import RunLedger
from silva.store.loads import read_rollout_dump

Line = dict[str, Any]

AGENTS = (
    AGENT
    + """
first = not os.path.exists(f"tried-{n}")
open(f"tried-{n}", "w").close()
messages += [ask(messages), {"role": "user", "content": "next"}]
messages.append(ask(messages))
if n == 1 and first: ask([{"role": "user", "content": "aside"}]); give({"reward": 2.0})
elif n == 2: give({"reward": 9.0}); sys.exit(3)
elif n == 3: give({"metadata": {"note": "no reward"}})
elif n == 4: give({"reward": {"score": 0.5, "style": 3}})
elif n == 5:
    with open(os.environ["RELAX_OUTPUT_JSON"], "w") as file:
        for name, num in (("short", 2), ("whole", 4)):
            print(json.dumps({"name": name, "messages": messages[:num], "reward": num}), file=file)
else: give({"reward": 1.0, "metadata": {"n": n}})
"""
)
FUNCTIONS = """
def judge(args, sample):
    assert sample.messages[0]["role"] == "user" and "hello" in sample.response
    return {"score": sample.label["points"], "turns": sample.num_turns}

def judge_all(args, samples):
    return [10.0 if sample.reward is None else None for sample in samples]
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, chatml_dir: Path) -> Path:
    """A run of six rows: a linear session, one that is retried, and others that fail in their own ways."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "agent.py").write_text(AGENTS)
    (folder / "rows.jsonl").write_text(
        "".join(
            json.dumps({"input": f"q {n}", "metadata": {"n": n}, "answer": {"points": n / 4}}) + "\n" for n in range(6)
        )
    )
    (folder / "script.jsonl").write_text('{"text": "hello"}\n{"text": "A b", "finish_reason": "length"}\n')
    done = run_silva(
        *("rollout", "--use-agentic-rollout", "--agent-command", "exec python3 -I agent.py", "--agent-retries", 1),
        *("--prompt-data", "rows.jsonl", "--label-key", "answer", "--rollout-batch-size", 4, "--run-dir", "run"),
        *("--engine", "scripted", "--engine-script", "script.jsonl", "--hf-checkpoint", chatml_dir),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def reexport(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[Line, dict[Any, list[Line]]]]:
    """Run the command in this process; its summary, and the lines of the sessions by row and try."""

    def run(*options: object, run_dir: Path | None = None) -> tuple[Line, dict[Any, list[Line]]]:
        out = str(tmp_path / "out" / "{rollout_id}.jsonl")
        words = ["reexport", str(run_dir or recorded), "--out", out, "--json", *map(str, options)]
        assert main(words) == 0, capsys.readouterr().err
        document = json.loads(capsys.readouterr().out)
        return document, _by_try([line for path in document["files"] for line in _lines(Path(path))])

    return run


def _lines(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _by_try(lines: list[Line]) -> dict[Any, list[Line]]:
    found: dict[Any, list[Line]] = {}
    for line in lines:
        found.setdefault((line["row"], line["try_index"]), []).append(line)
    return found


def _ends(found: dict[Any, list[Line]]) -> dict[Any, str]:
    return {key: lines[0]["reason"] or lines[0]["status"] for key, lines in found.items()}


RECORDED = {
    (0, 0): "exported",
    (1, 0): "not_linear",
    (1, 1): "exported",
    (2, 0): "agent_exit",
    (2, 1): "agent_exit",
    (3, 0): "reward_missing",
    (4, 0): "reward_invalid",
    (4, 1): "reward_invalid",
    (5, 0): "exported",
}


@pytest.mark.slow
def test_the_same_options_give_the_same_samples(recorded: Path, reexport: Any) -> None:
    document, found = reexport()
    old = _by_try([line for step in (0, 1) for line in _lines(recorded / "samples" / f"{step}.jsonl")])
    assert _ends(old) == RECORDED
    assert list(found) == list(old)
    changed = {
        (*key, name)
        for key, lines in old.items()
        for was, now in zip(lines, found[key], strict=True)
        for name in was
        if was[name] != now[name]
    }
    # A rollout gives no credit, and the ends of agents' logs stand in the first error only.
    assert {name for _, _, name in changed} <= {"credit", "error"}
    assert [line["credit"] for key in ((0, 0), (5, 0)) for line in found[key]] == [0.0, None, None]
    assert document["train"]["before"] == document["train"]["after"]
    assert document["train"]["after"]["mean_reward"] == pytest.approx((1 + 1 + 2) / 3)
    groups = read_rollout_dump(Path(document["files"][0]))
    assert [group.prompt_state for group in groups] == ["delivered", "delivered", "dropped", "dropped"]
    assert groups[0].slots()[0].contexts[0].sample.logprobs == old[0, 0][0]["logprobs"]


def test_other_exports_and_reward_keys(reexport: Any) -> None:
    document, found = reexport("--agentic-export", "last", "--reward-key", "score")
    assert _ends(found) == {
        **{key: end for key, end in RECORDED.items() if key not in ((1, 1), (4, 1))},
        (1, 0): "exported",
        (4, 0): "exported",
    }
    assert document["train"]["num_left_out"] == 2
    (aside,), (scored,) = found[1, 0], found[4, 0]
    assert aside["session_reward"] == 2.0 and aside["num_turns"] == 1 and aside["messages"][0]["content"] == "aside"
    assert (scored["reward"], scored["helpers"], scored["truncated"]) == (0.5, {"style": 3.0}, True)
    assert document["train"]["after"]["groups"] == {"delivered": {"none": 4}, "dropped": {"all_sessions_failed": 2}}
    _, found = reexport("--force", "--agentic-export", "leaves")
    assert [line["name"] for line in found[1, 0]] == ["leaf-0", "leaf-1"]


def test_other_reward_functions(tmp_path: Path, reexport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reexport_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    _, found = reexport("--custom-rm-path", "reexport_functions.judge", "--reward-key", "score")
    (judged,) = found[3, 0]
    assert (judged["reward"], judged["helpers"]) == (0.75, {"turns": 2.0})
    assert (judged["metadata"], judged["session_metadata"]) == ({"note": "no reward"}, {"note": "no reward"})
    assert found[0, 0][0]["reward"] == 1.0
    _, found = reexport("--custom-rm-path", "reexport_functions.judge_all", "--group-rm", "--force")
    assert [found[row, 0][0]["reward"] for row in (0, 3)] == [1.0, 10.0]


def test_damaged_and_open_sessions_are_lines(recorded: Path, tmp_path: Path, reexport: Any) -> None:
    """Neither sessions that cannot be read nor those that still run are a reason to stop."""
    copy = tmp_path / "copy"
    shutil.copytree(recorded, copy)
    with sqlite3.connect(copy / "run.db") as conn:
        session_of = dict(
            conn.execute(
                "SELECT row, session_id FROM sessions JOIN groups USING (group_id) JOIN prompts USING (prompt_id)"
            )
        )
        conn.execute("UPDATE sessions SET output = x'0102' WHERE session_id = ?", (session_of[0],))
        conn.execute("UPDATE nodes SET messages = '[{\"role\": 7' WHERE session_id = ?", (session_of[5],))
        conn.execute("UPDATE nodes SET token_ids = x'01' WHERE session_id = ? AND node_id = 1", (session_of[3],))
    with RunLedger.open_existing(copy) as ledger:
        ledger.recover(train_step=0)
        ledger.issue_prompt("train:0:6", dataset="train", epoch=0, row=6, position=6, content={"metadata": {}})
        ledger.start_group("live", prompt_id="train:0:6", n=1, start_step=7)
        ledger.start_session("live-0", group_id="live", slot=0)
        ledger.flush()
        document, found = reexport(run_dir=copy)
    assert _ends(found) == {
        **RECORDED,
        (0, 0): "ledger_damaged",
        (3, 0): "ledger_damaged",
        (5, 0): "ledger_damaged",
        (6, 0): "running",
    }
    assert "output of the agent is damaged" in found[0, 0][0]["error"] and "node 1" in found[3, 0][0]["error"]
    assert found[0, 0][0]["output"] is None and found[6, 0][0]["prompt_state"] == "pending"
    assert [path.rsplit("/", 1)[1] for path in document["files"]] == ["0.jsonl", "1.jsonl", "7.jsonl"]


def test_sessions_of_open_runs_need_no_reward(tmp_path: Path, reexport: Any, recorded: Path) -> None:
    shutil.copytree(recorded, tmp_path / "copy")
    with sqlite3.connect(tmp_path / "copy" / "run.db") as conn:
        conn.execute("UPDATE prompts SET dataset = 'open'")
    _, found = reexport(run_dir=tmp_path / "copy")
    assert _ends(found)[3, 0] == "exported" and found[3, 0][0]["reward"] is None
    assert found[3, 0][0]["credit"] is None


def test_files_are_not_written_over(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reexport", str(recorded), "--out", str(tmp_path / "{rollout_id}.jsonl")]
    (tmp_path / "1.jsonl").write_text("mine")
    assert main(words) == 2
    assert "1 of 2 files exist already" in capsys.readouterr().err
    assert (tmp_path / "1.jsonl").read_text() == "mine" and not (tmp_path / "0.jsonl").exists()
    assert main([*words[:3], str(tmp_path / "x.jsonl")]) == 2
    assert "--out" in capsys.readouterr().err
    assert main([*words[:3], str(tmp_path / "1.jsonl" / "{rollout_id}.jsonl")]) == 1
    assert "cannot be written: " in capsys.readouterr().err
    assert main(["reexport", str(tmp_path)]) == 1
    assert "holds no run" in capsys.readouterr().err


def test_an_empty_run_and_no_torch(tmp_path: Path) -> None:
    with RunLedger(tmp_path):
        pass
    write_config_file(RunConfig(), tmp_path / "config.toml")
    code = (
        "import sys\nfrom silva.cli.main import main\nstatus = main(['reexport', sys.argv[1]])\n"
        "sys.exit(status or ('torch' in sys.modules and 'torch was imported') or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "holds no sessions" in done.stdout and not (tmp_path / "reexport").exists()
