"""A group has two steps: the one that started it and the one that trained it. Accounts go by the second."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from store_records import begin, exported, failed

from silva.store.documents import show_run
from silva.store.dumps import session_rows
from silva.store.files import DB_NAME, LedgerError
from silva.store.ledger import RunLedger
from silva.store.queries import accounting, open_run
from silva.store.step_numbers import gateway_numbers, start_lag


def steps_of(run_dir: Path) -> dict[str, tuple[int, int | None]]:
    return {group["group_id"]: (group["start_step"], group["train_step"]) for group in show_run(run_dir)["groups"]}


def test_a_group_counts_in_the_step_that_trained_it(tmp_path: Path) -> None:
    with RunLedger(tmp_path) as ledger:
        for number in (0, 1, 2):
            group = begin(ledger, number, rollout_id=3)
            ledger.end_session(exported(f"{group}-s0", group))
        ledger.end_prompts(["train:0:0"], "trained", train_step=3)
        ledger.end_prompts(["train:0:1"], "trained", train_step=5)
    with open_run(tmp_path) as conn:
        assert steps_of(tmp_path) == {"train-g0": (3, 3), "train-g1": (3, 5), "train-g2": (3, None)}
        by_step = {step: [row.group_id for row in session_rows(conn, step)] for step in (3, 4, 5)}
        assert by_step == {3: ["train-g0", "train-g2"], 4: [], 5: ["train-g1"]}
        assert [accounting(conn, step)["trained"] for step in (3, 4, 5)] == [1, 0, 1]
        assert accounting(conn, 3)["pending"] == 1
        assert start_lag(conn, 5) == {"rollout/start_lag/mean": 2.0, "rollout/start_lag/max": 2.0}
        assert (start_lag(conn, 3)["rollout/start_lag/max"], start_lag(conn, 4)) == (0.0, {})
        assert gateway_numbers(conn, 5)["gateway/requests"] > 0
        (line,) = session_rows(conn, 5)
        assert (line.rollout_id, line.start_step, line.train_step) == (5, 3, 5)


def test_a_group_that_was_given_up_keeps_its_step_when_its_prompt_runs_again(tmp_path: Path) -> None:
    with RunLedger(tmp_path) as ledger:
        begin(ledger, 0, rollout_id=1)
        ledger.end_session(failed("train-g0-s0", "train-g0"))
        ledger.end_prompts(["train:0:0"], "dropped", reason="all_sessions_failed", train_step=4)
    with RunLedger.open_existing(tmp_path) as ledger:
        assert [prompt.prompt_id for prompt in ledger.recover(train_step=3).pending] == ["train:0:0"]
        ledger.start_group("again", prompt_id="train:0:0", n=1, start_step=4, attempt=1)
        ledger.start_session("again-s0", group_id="again", slot=0)
        ledger.end_session(exported("again-s0", "again"))
        ledger.end_prompts(["train:0:0"], "trained", train_step=6)
    assert steps_of(tmp_path) == {"train-g0": (1, 4), "again": (4, 6)}


@pytest.mark.parametrize("version", [1, 2, 4])
def test_a_ledger_of_another_schema_is_refused_by_name(tmp_path: Path, version: int) -> None:
    RunLedger(tmp_path).close()
    with sqlite3.connect(tmp_path / DB_NAME) as conn:
        conn.execute("UPDATE schema_version SET version = ?", (version,))
    for use in (lambda: RunLedger.open_existing(tmp_path), lambda: show_run(tmp_path)):
        with pytest.raises(LedgerError, match=rf"run\.db is a run ledger of schema version {version}; .* version 3"):
            use()
