"""The run ledger on real files: what is written is what is read, promises are checked, nothing is half there."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from store_records import begin, exported, failed, forest, joined

from silva.store import ledger_writer
from silva.store.documents import show_run, show_session
from silva.store.files import DB_NAME, LedgerError
from silva.store.ledger import RunLedger
from silva.store.queries import check_ledgers, counts, open_run
from silva.types.rollout import ResponseSpan


def test_a_session_comes_back_as_it_went_in(tmp_path: Path) -> None:
    with RunLedger(tmp_path) as ledger:
        group = begin(ledger, 0)
        ledger.end_session(exported(f"{group}-s0", group)).result(5)
        doc = show_session(tmp_path, f"{group}-s0")
    assert {key: doc[key] for key in ("group_id", "mode", "status", "reason", "reward", "metadata")} == {
        "group_id": group,
        "mode": "train",
        "status": "exported",
        "reason": None,
        "reward": 1.0,
        "metadata": {"task": 1},
    }
    assert [n["token_ids"] for n in doc["nodes"]] == [n.token_ids for n in forest()]
    assert doc["nodes"][2] == {
        "node_id": 2,
        "parent_id": 1,
        "state_key": "key02",
        "kind": "response",
        "messages": [{"role": "user", "content": "m2"}],
        "token_ids": [1, 8, 9, 2],
        "loss_mask": [0, 1, 1, 1],
        "logprobs": [0.0, -0.1, -0.2, -0.3],
        "weight_spans": [[0, 1, -1], [1, 3, 3]],
        "finish_reason": "stop",
        "num_aborts": 2,
    }
    assert doc["samples"] == [
        {
            "name": None,
            "node_id": 4,
            "prompt_len": 4,
            "token_ids": [5, 6, 7, 1, 8, 9, 2, 10, 11, 1, 12, 2],
            "loss_mask": [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1],
            "logprobs": [0.0, 0.0, 0.0, 0.0, -0.1, -0.2, -0.3, 0.0, 0.0, 0.0, -0.1, -0.2],
            "reward": 1.0,
            "credit": None,
            "metadata": {},
        }
    ]
    first, second = doc["requests"]
    assert first["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "cached_tokens": 0, "reasoning_tokens": 0}
    assert (second["stream"], second["repairs"], second["node_id"], second["latency_s"]) == (
        True,
        ["trimmed"],
        None,
        None,
    )
    assert second["difference"] == {"pointer": "/messages/2/content", "old": "a", "new": "b"}


def test_a_shared_prefix_that_trains_once_is_stored_as_a_mask(tmp_path: Path) -> None:
    nodes = forest()
    ids = {"session_id": "train-g0-s0", "group_id": "train-g0"}
    main = joined(nodes, 4, name="main", **ids)
    side = joined(
        nodes,
        6,
        name="side",
        loss_mask=[0] * 9 + [1] * 2,
        logprobs=[0.0] * 9 + [-0.1, -0.2],
        kept_mass=[1.0] * 9 + [0.9] * 2,
        metadata={"role": "side"},
        reward=None,
        **ids,
    )
    with RunLedger(tmp_path) as ledger:
        group = begin(ledger, 0)
        ledger.end_session(exported("train-g0-s0", group, nodes=nodes, samples=[main, side]))
        ledger.set_credits([replace(main, credit=0.5), replace(side, credit=-0.5)])
        ledger.flush()
        doc = show_session(tmp_path, "train-g0-s0")
    assert [sample["credit"] for sample in doc["samples"]] == [0.5, -0.5]
    assert doc["samples"][1]["token_ids"] == [5, 6, 7, 1, 8, 9, 2, 13, 1, 14, 15]
    assert doc["samples"][1]["loss_mask"] == side.loss_mask
    assert doc["samples"][1]["logprobs"] == [0.0] * 9 + [-0.1, -0.2]


@pytest.mark.parametrize("change", ["ids", "mask", "logprobs"])
def test_a_sample_that_differs_from_its_nodes_is_refused_whole(tmp_path: Path, change: str) -> None:
    good = joined(forest(), 4, session_id="train-g0-s0", group_id="train-g0")
    wrong = {
        "ids": {"token_ids": [99, *good.token_ids[1:]]},
        "mask": {
            "loss_mask": [1, *good.loss_mask[1:]],
            "responses": (ResponseSpan(node_id=1, start=0, length=1), *good.responses),
        },
        "logprobs": {"logprobs": [*good.logprobs[:-1], -7.0]},
    }[change]
    bad = joined(forest(), 4, session_id="train-g0-s0", group_id="train-g0", **wrong)
    ledger = RunLedger(tmp_path)
    group = begin(ledger, 0)
    future = ledger.end_session(exported("train-g0-s0", group, samples=[bad]))
    with pytest.raises(AssertionError, match="train-g0-s0"):
        future.result(5)
    with pytest.raises(AssertionError, match="refused a record"):
        ledger.event("later")
    with pytest.raises(AssertionError, match="refused a record"):
        ledger.close()
    assert show_session(tmp_path, "train-g0-s0")["nodes"] == []


def test_promises_between_parts_are_checked_at_once(tmp_path: Path) -> None:
    with RunLedger(tmp_path) as ledger:
        group = begin(ledger, 0, n=2)
        with pytest.raises(AssertionError, match="pending already"):
            ledger.issue_prompt("train:0:0", dataset="train", epoch=0, row=0, position=1)
        with pytest.raises(AssertionError, match="slot 2 of 2"):
            ledger.start_session("x", group_id=group, slot=2)
        with pytest.raises(AssertionError, match="no valid text"):
            ledger.start_session("\ud800", group_id=group, slot=0)
        with pytest.raises(AssertionError, match="not pending"):
            ledger.start_group("h", prompt_id="train:0:9", n=1, start_step=0)
        with pytest.raises(AssertionError, match="without a reason"):
            ledger.end_session(failed(f"{group}-s0", group, reason=""))
        with pytest.raises(AssertionError, match="with 0 samples"):
            ledger.end_session(exported(f"{group}-s0", group, samples=[]))
        with pytest.raises(AssertionError, match="reward nan"):
            ledger.end_session(failed(f"{group}-s0", group, reward=float("nan")))
        with pytest.raises(AssertionError, match="without a reason"):
            ledger.end_prompts(["train:0:0"], "dropped", train_step=0)
        ledger.end_session(exported(f"{group}-s0", group))
        with pytest.raises(AssertionError, match="not running"):
            ledger.end_session(exported(f"{group}-s0", group))
        ledger.end_session(failed(f"{group}-s1", group))
        ledger.end_prompts(["train:0:0"], "trained", train_step=0)
        with pytest.raises(AssertionError, match="ended already"):
            ledger.end_prompts(["train:0:0"], "dropped", reason="late", train_step=0)
        ledger.flush()
        with open_run(tmp_path) as conn:
            check_ledgers(conn, finished=True)
    with pytest.raises(AssertionError, match="closed"):
        ledger.event("late")


def test_end_prompts_is_all_or_nothing(tmp_path: Path) -> None:
    with RunLedger(tmp_path) as ledger:
        begin(ledger, 0)
        with pytest.raises(AssertionError, match="train:0:7"):
            ledger.end_prompts(["train:0:0", "train:0:7"], "dropped", reason="x", train_step=0)
        ledger.flush()
        with open_run(tmp_path) as conn:
            assert counts(conn)["prompts"] == {"pending": {"none": 1}}


def test_counts_keep_eval_apart(tmp_path: Path) -> None:
    with RunLedger(tmp_path) as ledger:
        group = begin(ledger, 0, n=2)
        ledger.end_session(failed(f"{group}-s0", group))
        ledger.start_session("retry", group_id=group, slot=0, try_index=1)
        ledger.end_session(exported("retry", group))
        ledger.end_session(exported(f"{group}-s1", group))
        ledger.end_prompts(["train:0:0"], "filtered", reason="all_equal", train_step=0)
        other = begin(ledger, 0, mode="eval")
        ledger.end_session(exported(f"{other}-s0", other, mode="eval"))
        ledger.end_prompts(["eval:0:0"], "delivered", train_step=0)
    doc = show_run(tmp_path)
    assert doc["counts"] == {
        "prompts": {"filtered": {"all_equal": 1}},
        "sessions": {"exported": {"none": 2}, "failed": {"agent_exit": 1}},
        "eval": {"prompts": {"delivered": {"none": 1}}, "sessions": {"exported": {"none": 1}}},
    }
    assert doc["sessions"][0] == {
        "session_id": "train-g0-s0",
        "group_id": "train-g0",
        "mode": "train",
        "status": "failed",
        "reason": "agent_exit",
        "reward": None,
    }
    assert [(group["start_step"], group["train_step"]) for group in doc["groups"]] == [(0, 0), (0, 0)]


def test_a_credit_for_an_unknown_context_is_refused(tmp_path: Path) -> None:
    ledger = RunLedger(tmp_path)
    group = begin(ledger, 0)
    record = exported(f"{group}-s0", group)
    ledger.end_session(record)
    known = replace(record.samples[0], credit=1.0)
    with pytest.raises(AssertionError, match="0 rows changed"):
        ledger.set_credits([known, replace(known, name="ghost")]).result(5)
    with pytest.raises(AssertionError):
        ledger.close()
    doc = show_session(tmp_path, f"{group}-s0")
    assert (doc["status"], doc["samples"][0]["credit"]) == ("exported", None)


def test_a_reader_sees_one_moment(tmp_path: Path) -> None:
    with RunLedger(tmp_path) as ledger:
        group = begin(ledger, 0)
        ledger.flush()
        with open_run(tmp_path) as conn:
            before = counts(conn)
            ledger.end_session(failed(f"{group}-s0", group)).result(5)
            assert counts(conn) == before
        with open_run(tmp_path) as conn:
            assert counts(conn)["sessions"] == {"failed": {"agent_exit": 1}}


ODD_METADATA = {
    "nan": float("nan"),
    "inf": float("-inf"),
    "big": 10**60,
    "text": "né 漢字 \x00 \x1b[31m \ud83d",
    "key \udc00": [True, None, 1.5],
    "nested": {"a": [{"b": []}]},
}


def test_odd_metadata_is_kept(tmp_path: Path) -> None:
    with RunLedger(tmp_path) as ledger:
        group = begin(ledger, 0)
        record = failed(
            f"{group}-s0", group, reward=10**30, reason="odd \udcff", error="log \udcfe\x00 end", metadata=ODD_METADATA
        )
        ledger.end_session(record).result(5)
        doc = show_session(tmp_path, f"{group}-s0")
    assert repr(doc["metadata"]) == repr(ODD_METADATA)
    assert doc["reward"] == 1e30
    assert doc["reason"] == "odd \\udcff"
    assert doc["error"] == "log \\udcfe\x00 end"


@pytest.mark.slow
def test_a_live_reader_beside_a_writer(tmp_path: Path) -> None:
    problems: list[BaseException] = []
    done = threading.Event()
    seen: list[int] = []

    def read() -> None:
        try:
            while not done.is_set():
                with open_run(tmp_path) as conn:
                    check_ledgers(conn)
                    seen.append(sum(counts(conn)["sessions"].get("exported", {}).values()))
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            problems.append(error)

    with RunLedger(tmp_path) as ledger:
        ledger.flush()
        reader = threading.Thread(target=read)
        reader.start()
        try:
            for number in range(25):
                group = begin(ledger, number)
                ledger.end_session(exported(f"{group}-s0", group))
                ledger.end_prompts([f"train:0:{number}"], "trained", train_step=number).result(5)
                live = show_session(tmp_path, f"{group}-s0")
                assert live["status"] == "exported"
        finally:
            done.set()
            reader.join(30)
    assert not problems
    assert seen == sorted(seen)
    with open_run(tmp_path) as conn:
        check_ledgers(conn, finished=True)


def test_a_session_that_still_runs_shows_as_running(tmp_path: Path) -> None:
    with RunLedger(tmp_path) as ledger:
        group = begin(ledger, 0)
        ledger.flush()
        doc = show_session(tmp_path, f"{group}-s0")
        assert (doc["status"], doc["nodes"], doc["samples"], doc["requests"]) == ("running", [], [], [])
        assert (doc["reward"], doc["metadata"]) == (None, {})
        ledger.end_session(failed(f"{group}-s0", group))


async def test_a_cancelled_wait_does_not_undo_the_write(tmp_path: Path) -> None:
    with RunLedger(tmp_path) as ledger:
        group = begin(ledger, 0)
        waiting = asyncio.wrap_future(ledger.end_session(failed(f"{group}-s0", group)))
        waiting.cancel()
        await asyncio.wrap_future(ledger.flush_future())
        assert show_session(tmp_path, f"{group}-s0")["status"] == "failed"


def test_a_flush_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forced: list[str] = []
    monkeypatch.setattr(
        ledger_writer.os, "fsync", lambda fd: forced.append(Path(f"/proc/self/fd/{fd}").readlink().name)
    )
    with RunLedger(tmp_path) as ledger:
        begin(ledger, 0)
        ledger.event("a").result(30)
        assert forced == [], "a write alone leaves that to the system"
        ledger.flush()
        assert forced == [f"{DB_NAME}-wal"]


KILLED = """
import os, sys
sys.path.insert(0, sys.argv[2])
from store_records import begin, exported
from silva.store.ledger import RunLedger
ledger = RunLedger(sys.argv[1])
number = 0
while True:
    group = begin(ledger, number, n=3)
    for slot in range(3):
        done = ledger.end_session(exported(f"{group}-s{slot}", group))
    ledger.end_prompts([f"train:0:{number}"], "trained", train_step=number)
    number += 1
    if number % 8 == 0:
        done.result()
        print(number, flush=True)
"""


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}


@pytest.mark.parametrize("num_lines", [1, 4])
def test_kill_9_leaves_sessions_whole(tmp_path: Path, num_lines: int) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run"), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment()) as writer:
        assert writer.stdout is not None
        try:
            told = [int(writer.stdout.readline()) for _ in range(num_lines)][-1]
        finally:
            os.kill(writer.pid, signal.SIGKILL)
    with open_run(tmp_path / "run") as conn:
        check_ledgers(conn)
        rows = conn.execute(
            "SELECT status, (SELECT count(*) FROM nodes n WHERE n.session_id = s.session_id), "
            "(SELECT count(*) FROM requests r WHERE r.session_id = s.session_id), "
            "(SELECT count(*) FROM samples m WHERE m.session_id = s.session_id) FROM sessions s"
        ).fetchall()
    assert {tuple(row) for row in rows} <= {("exported", 7, 2, 1), ("running", 0, 0, 0)}
    assert sum(row[0] == "exported" for row in rows) >= 3 * told
    with RunLedger.open_existing(tmp_path / "run") as ledger:
        recovered = ledger.recover(train_step=3)
        assert [prompt.position for prompt in recovered.pending][:2] == [4, 5]
        assert recovered.next_position >= told
        with open_run(tmp_path / "run") as conn:
            check_ledgers(conn, finished=True)


def test_recover_gives_every_prompt_that_has_no_end(tmp_path: Path) -> None:
    with RunLedger(tmp_path) as ledger:
        for number in range(5):
            group = begin(ledger, number)
            if number < 4:
                ledger.end_session(exported(f"{group}-s0", group))
        ledger.end_prompts(["train:0:0", "train:0:2"], "trained", train_step=1)
        ledger.end_prompts(["train:0:1"], "stale", reason="too_old", train_step=2)
        for number, state in ((0, "delivered"), (1, None)):
            group = begin(ledger, number, mode="eval")
            if state:
                ledger.end_session(exported(f"{group}-s0", group, mode="eval"))
                ledger.end_prompts([f"eval:0:{number}"], "delivered", train_step=2)
    with RunLedger.open_existing(tmp_path) as ledger:
        with pytest.raises(AssertionError, match="recover"):
            ledger.event("too early")
        recovered = ledger.recover(train_step=1)
        assert [(p.prompt_id, p.row, p.position, p.num_groups) for p in recovered.pending] == [
            ("train:0:1", 1, 1, 1),
            ("train:0:3", 3, 3, 1),
            ("train:0:4", 4, 4, 1),
        ]
        assert (recovered.next_position, recovered.num_interrupted, recovered.num_rolled_back) == (5, 2, 1)
        with open_run(tmp_path) as conn:
            assert counts(conn) == {
                "prompts": {"pending": {"none": 2, "rolled_back": 1}, "trained": {"none": 2}},
                "sessions": {"cancelled": {"interrupted": 1}, "exported": {"none": 4}},
                "eval": {
                    "prompts": {"dropped": {"interrupted": 1, "rolled_back": 1}},
                    "sessions": {"cancelled": {"interrupted": 1}, "exported": {"none": 1}},
                },
            }
        for prompt in recovered.pending:
            again = f"again-{prompt.row}"
            ledger.start_group(again, prompt_id=prompt.prompt_id, n=1, start_step=2, attempt=prompt.num_groups)
            ledger.start_session(f"{again}-s", group_id=again, slot=0)
            ledger.end_session(exported(f"{again}-s", again))
        ledger.end_prompts([prompt.prompt_id for prompt in recovered.pending], "trained", train_step=2)
        ledger.issue_prompt("eval:0:0", dataset="eval", epoch=0, row=0, position=0, mode="eval")
        ledger.start_group("eval-again", prompt_id="eval:0:0", n=1, start_step=2, attempt=1)
        ledger.start_session("eval-again-s", group_id="eval-again", slot=0)
        ledger.end_session(exported("eval-again-s", "eval-again", mode="eval"))
        ledger.end_prompts(["eval:0:0"], "delivered", train_step=2)
    with open_run(tmp_path) as conn:
        check_ledgers(conn, finished=True)
        assert counts(conn)["prompts"] == {"trained": {"none": 5}}


def test_two_writers_are_refused(tmp_path: Path) -> None:
    with RunLedger(tmp_path):
        for resume in (True, False):
            with pytest.raises(LedgerError, match=f"pid {os.getpid()}"):
                RunLedger(tmp_path, resume=resume)
    with RunLedger(tmp_path) as ledger:  # nothing was written yet: a start that failed may be made again
        ledger.event("run_start")
    with pytest.raises(LedgerError, match="holds a run already"):
        RunLedger(tmp_path)


def test_files_that_are_no_ledger_are_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="no run to go on with"):
        RunLedger.open_existing(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "run.db").write_text("this is no database, however long it may be" * 50)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "run.db").touch()
    (tmp_path / "other").mkdir()
    with sqlite3.connect(tmp_path / "other" / "run.db") as conn:
        conn.execute("CREATE TABLE t (x)")
    conn.close()
    RunLedger(tmp_path / "newer").close()
    with sqlite3.connect(tmp_path / "newer" / "run.db") as conn:
        conn.execute("UPDATE schema_version SET version = 99")
    conn.close()
    for name, words in (
        ("text", "cannot be read"),
        ("half", "empty ledger"),
        ("other", "not a run ledger"),
        ("newer", "version 99"),
    ):
        with pytest.raises(LedgerError, match=words):
            RunLedger.open_existing(tmp_path / name)
        with pytest.raises(LedgerError, match=words), open_run(tmp_path / name):
            pass
    RunLedger(tmp_path / "half").close()
    assert show_run(tmp_path / "half")["sessions"] == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    with RunLedger(tmp_path) as ledger:
        for number in range(20):
            group = begin(ledger, number)
            ledger.end_session(exported(f"{group}-s0", group))
    path = tmp_path / "run.db"
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(LedgerError, match=r"run\.db cannot be read"):
        show_run(tmp_path)


READ_AS_NOBODY = """
import os, sys
from silva.store.documents import show_run
if os.getuid() == 0:
    os.setuid(65534)
assert not os.access(sys.argv[1], os.W_OK)
print(len(show_run(sys.argv[1])["sessions"]))
"""


def test_a_finished_run_can_be_read_where_nobody_may_write() -> None:
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name)  # directly below /tmp, where another user can reach it
        with RunLedger(run_dir) as ledger:
            group = begin(ledger, 0)
            ledger.end_session(failed(f"{group}-s0", group))
        assert sorted(path.name for path in run_dir.iterdir()) == ["run.db", "run.lock"]
        run_dir.chmod(0o555)
        try:
            command = [sys.executable, "-c", READ_AS_NOBODY, name]
            found = subprocess.run(command, capture_output=True, text=True, timeout=60, env=_environment())
        finally:
            run_dir.chmod(0o755)
    assert found.stdout.strip() == "1", found.stderr


def test_a_locked_file_surfaces_and_names_the_way_out(tmp_path: Path) -> None:
    ledger = RunLedger(tmp_path, busy_timeout_s=0.05)
    begin(ledger, 0)
    ledger.flush()
    other = sqlite3.connect(tmp_path / "run.db", isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match="locked"):
            ledger.event("blocked").result(10)
        with pytest.raises(LedgerError, match="--resume"):
            ledger.end_prompts(["train:0:0"], "dropped", reason="x", train_step=0)
    finally:
        other.close()
    with pytest.raises(LedgerError, match="cannot be written"):
        ledger.close()
    ledger.close()


FULL = """
import resource, signal, sys
sys.path.insert(0, sys.argv[2])
from store_records import begin, exported
from silva.store.ledger import RunLedger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
ledger = RunLedger(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
for number in range(100_000):
    group = begin(ledger, number)
    done = ledger.end_session(exported(f"{group}-s0", group))
    if number % 10 == 0:
        done.result()
"""


def test_a_full_disk_stops_the_run_and_keeps_what_was_written(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL, str(tmp_path), str(Path(__file__).parent)]
    found = subprocess.run(command, capture_output=True, text=True, env=_environment(), timeout=60)
    assert found.returncode == 1
    assert f"LedgerError: the run ledger {tmp_path}/run.db cannot be written" in found.stderr
    with RunLedger.open_existing(tmp_path) as ledger:
        assert ledger.recover(train_step=0).next_position > 10
    with open_run(tmp_path) as conn:
        check_ledgers(conn, finished=True)


def test_two_sessions_of_one_slot_are_found(tmp_path: Path) -> None:
    with RunLedger(tmp_path) as ledger:
        group = begin(ledger, 0)
        ledger.end_session(exported(f"{group}-s0", group))
        ledger.start_session("second", group_id=group, slot=0, try_index=1)
        ledger.end_session(exported("second", group))
        ledger.end_prompts(["train:0:0"], "trained", train_step=0)
        ledger.flush()
        with open_run(tmp_path) as conn, pytest.raises(AssertionError) as found:
            check_ledgers(conn)
    assert "more than one session of a slot" in str(found.value)
    assert "after one that succeeded" in str(found.value)


def test_a_trained_prompt_without_a_session_is_found(tmp_path: Path) -> None:
    with RunLedger(tmp_path) as ledger:
        group = begin(ledger, 0)
        ledger.end_prompts(["train:0:0"], "trained", train_step=0)
        ledger.flush()
        with open_run(tmp_path) as conn, pytest.raises(AssertionError, match="without an exported session"):
            check_ledgers(conn)
        with open_run(tmp_path) as conn, pytest.raises(AssertionError, match="still running"):
            check_ledgers(conn, finished=True)
        ledger.end_session(failed(f"{group}-s0", group))
