"""Rollout dumps and the accounting of a rollout step, read from real ledgers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from store_records import begin, exported, failed, forest, joined

from silva.store import files
from silva.store.dumps import check_dump_template, write_rollout_dump
from silva.store.files import whole_file
from silva.store.ledger import RunLedger
from silva.store.queries import accounting, accounting_line, open_run
from silva.types.errors import ConfigError


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Rollout 0: two contexts, a failure, an eval session. Rollout 1: one session."""
    run_dir = tmp_path / "run"
    with RunLedger(run_dir) as ledger:
        group = begin(ledger, 0, n=2)
        ids = {"session_id": f"{group}-s0", "group_id": group}
        samples = [
            joined(forest(), 4, name="main", metadata={"score": float("nan"), "who": "né"}, **ids),
            joined(forest(), 6, name="side", reward=None, truncated=True, **ids),
        ]
        ledger.end_session(exported(f"{group}-s0", group, samples=samples, metadata={"big": 10**40}, reward=0.5))
        ledger.set_credits([replace(samples[0], credit=0.75), replace(samples[1], credit=0.0)])
        ledger.end_session(failed(f"{group}-s1", group, "agent exit=3"))
        ledger.end_prompts(["train:0:0"], "trained", train_step=0)
        begin(ledger, 1)
        ledger.end_session(exported("train-g1-s0", "train-g1"))
        ledger.end_prompts(["train:0:1"], "filtered", reason="all_equal", train_step=0)
        begin(ledger, 0, mode="eval")
        ledger.end_session(exported("eval-g0-s0", "eval-g0", mode="eval"))
        ledger.end_prompts(["eval:0:0"], "delivered", train_step=0)
        begin(ledger, 2, rollout_id=1)
        ledger.flush()
    return run_dir


def test_a_dump_has_a_line_a_context_and_a_line_a_failure(run_dir: Path, tmp_path: Path) -> None:
    with open_run(run_dir) as conn:
        path = write_rollout_dump(f"{tmp_path}/deep/er/rollout_{{rollout_id}}.jsonl", 0, conn, mode="train")
    assert path == tmp_path / "deep/er/rollout_0.jsonl"
    assert [other.name for other in path.parent.iterdir()] == ["rollout_0.jsonl"]
    main, side, lost, single = (json.loads(line) for line in path.read_text().splitlines())
    assert [line["session_id"] for line in (main, side, lost, single)] == [
        "train-g0-s0",
        "train-g0-s0",
        "train-g0-s1",
        "train-g1-s0",
    ]
    assert (main["name"], main["state_key"], main["credit"], main["reward"]) == ("main", "key04", 0.75, 1.0)
    assert main["metadata"] == {"score": "NaN", "who": "né"}
    assert main["session_metadata"] == {"big": 10**40}
    assert (main["num_turns"], main["num_aborts"], main["prompt_len"]) == (2, 2, 4)
    assert main["token_ids"] == [5, 6, 7, 1, 8, 9, 2, 10, 11, 1, 12, 2]
    assert main["logprobs"][4:7] == [-0.1, -0.2, -0.3]
    assert main["kept_mass"][3:7] == [1.0, 0.9, 0.9, 0.9]
    assert main["weight_spans"] == [[0, 4, -1], [4, 3, 3], [7, 3, -1], [10, 2, 5]]
    assert (main["min_weight_version"], main["max_weight_version"]) == (3, 3)
    assert [request["latency_s"] for request in main["requests"]] == [0.25, None]
    assert (side["state_key"], side["reward"], side["truncated"]) == ("key06", None, True)
    assert (lost["status"], lost["reason"], lost["error"]) == ("failed", "agent exit=3", "exit 3")
    assert (lost["token_ids"], lost["state_key"], lost["session_turns"]) == ([], None, 3)
    assert set(lost) == set(main)


def test_a_dump_replaces_an_older_one_and_holds_live_sessions(run_dir: Path, tmp_path: Path) -> None:
    template = f"{tmp_path}/{{rollout_id}}.jsonl"
    Path(tmp_path / "1.jsonl").write_text("old")
    with open_run(run_dir) as conn:
        (line,) = write_rollout_dump(template, 1, conn).read_text().splitlines()
        assert json.loads(line)["status"] == "running"
        assert write_rollout_dump(template, 7, conn).read_text() == ""
        assert len(write_rollout_dump(template, 0, conn).read_text().splitlines()) == 5


def test_a_dump_goes_by_groups_slots_and_tries_whenever_they_started(tmp_path: Path) -> None:
    with RunLedger(tmp_path / "run") as ledger:
        for row in range(2):
            ledger.issue_prompt(f"train:0:{row}", dataset="train", epoch=0, row=row, position=row)
            ledger.start_group(f"g{row}", prompt_id=f"train:0:{row}", n=2, start_step=0)
        places = [("g1", 0, 0), ("g0", 1, 0), ("g0", 0, 1), ("g0", 0, 0)]
        for group, slot, number in places:
            ledger.start_session(f"{group}-{slot}-{number}", group_id=group, slot=slot, try_index=number)
        ledger.flush()
        with open_run(tmp_path / "run") as conn:
            lines = write_rollout_dump(f"{tmp_path}/{{rollout_id}}.jsonl", 0, conn).read_text().splitlines()
    assert [json.loads(line)["session_id"] for line in lines] == ["g0-0-0", "g0-0-1", "g0-1-0", "g1-0-0"]


def test_a_dump_appears_whole_on_the_disk_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forced: list[str] = []
    monkeypatch.setattr(files.os, "fsync", lambda _: forced.extend(path.name for path in tmp_path.iterdir()))
    with whole_file(tmp_path / "a") as file:
        file.write(b"x")
    assert len(forced) == 1 and forced != ["a"], "forced to the disk before it gets its name"
    with pytest.raises(KeyError), whole_file(tmp_path / "b") as file:
        file.write(b"x")
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "template", ["dump.jsonl", "{rollout}.jsonl", "{rollout_id}-{step}.jsonl", "{rollout_id}{", "{{rollout_id}}"]
)
def test_a_template_needs_exactly_the_one_placeholder(template: str) -> None:
    with pytest.raises(ConfigError, match=r"\{rollout_id\}"):
        check_dump_template(template)
    check_dump_template("a/{rollout_id}/b.jsonl")


def test_the_accounting_of_a_rollout_adds_up(run_dir: Path) -> None:
    with open_run(run_dir) as conn:
        account = accounting(conn, 0)
        assert accounting(conn, 0, mode="eval")["delivered"] == 1
        assert accounting(conn, 9)["prompts"] == 0
        assert accounting_line(9, accounting(conn, 9)).endswith(
            "failures=none turns=0 tokens=0 aborts=0 rewarded=0 reward=none"
        )
    assert account == {
        "prompts": 2,
        "trained": 1,
        "delivered": 0,
        "filtered": 1,
        "dropped": 0,
        "stale": 0,
        "pending": 0,
        "sessions": 3,
        "exported": 2,
        "failed": 1,
        "cancelled": 0,
        "running": 0,
        "failures": {"agent exit=3": 1},
        "turns": 9,
        "tokens": 21,
        "aborts": 6,
        "rewarded": 2,
        "reward": 0.75,
    }
    line = accounting_line(0, account)
    assert line.startswith("AGENTIC ROLLOUT event=accounting_end rollout=0 prompts=2 trained=1 ")
    assert " failures=agent_exit_3:1 turns=9 tokens=21 aborts=6 rewarded=2 reward=0.75" in line
    assert all(part.count("=") == 1 for part in line.removeprefix("AGENTIC ROLLOUT ").split(" "))
