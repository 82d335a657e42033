"""The run ledger: what became of every prompt and every session of a run, in `RUN_DIR/run.db`.

    issue_prompt -> start_group -> start_session ... end_session -> set_credits -> end_prompts
       pending                        running        exported                        trained

One process writes, through one thread: a call checks its arguments, queues the write and returns. Any number of
processes may read meanwhile (`silva.store.queries`).
"""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from silva.store.encode import to_column
from silva.store.files import DB_NAME
from silva.store.ledger_writer import LedgerWriter, Statement, insert
from silva.store.rows import insert_session_rows
from silva.types import Clock, JsonObject, Mode, PromptState, SessionRow, SystemClock, TrainingSample, safe_text

_FINAL_WITHOUT_REASON = ("trained", "delivered")


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingPrompt:
    """A prompt that has no end yet."""

    prompt_id: str
    """`DATASET:EPOCH:ROW`."""
    epoch: int
    """From 0."""
    row: int
    """Row of the dataset file, from 0."""
    position: int
    """Place in the order of issue, from 0."""
    num_groups: int
    """Groups that were started for it so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """Where a resumed run continues."""

    pending: list[PendingPrompt]
    """Train prompts to run again, in order of issue. They are issued already."""
    next_position: int
    """Position of the next new prompt."""
    num_interrupted: int
    """Sessions that were running when the run stopped."""
    num_rolled_back: int
    """Prompts that were trained after the checkpoint."""


class RunLedger:
    """Writes the run ledger.

    Every writing method checks its arguments at once (AssertionError), queues the write and returns a Future of it. The
    writer thread takes what is queued into one transaction, in order of call. After a failed write its Future, all
    later ones and every later call raise, so nothing is lost silently. Futures cannot be cancelled. Methods may be
    called from any thread; only `flush`, `recover` and `close` block. Do not change a row after handing it over.

    Without `resume` the file is created; LedgerError if it exists. A killed process loses at most what was queued, a
    power cut at most what came after the last flush.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        clock: Clock | None = None,
        busy_timeout_s: float = 30.0,
        resume: bool = False,
    ):
        self.path = Path(run_dir) / DB_NAME
        self._clock = clock or SystemClock()
        self._writer = LedgerWriter(Path(run_dir), busy_timeout_s, resume=resume)
        self._mutex = threading.Lock()
        self._closed = False
        self._recovered = not resume
        self._pending: dict[str, Mode] = {}
        self._reopenable: set[str] = set()
        self._groups: dict[str, tuple[str, Mode, int]] = {}
        self._groups_of: dict[str, list[str]] = {}
        self._running: dict[str, tuple[str, Mode]] = {}

    @classmethod
    def open_existing(
        cls, run_dir: str | Path, *, clock: Clock | None = None, busy_timeout_s: float = 30.0
    ) -> RunLedger:
        """Open the ledger of a stopped run to go on with it. `recover` must be the first call."""
        return cls(run_dir, clock=clock, busy_timeout_s=busy_timeout_s, resume=True)

    def __enter__(self) -> RunLedger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Prompts

    def issue_prompt(
        self,
        prompt_id: str,
        *,
        dataset: str,
        epoch: int,
        row: int,
        position: int,
        mode: Mode = "train",
        content: JsonObject | None = None,
    ) -> Future[object]:
        """One use of one dataset row begins. An id is used once (an eval prompt again after `recover` closed it).

        `content` is the content of the row: the messages and metadata that the agent gets, and the label.
        """
        where = {"dataset": safe_text(dataset), "epoch": epoch, "row": row, "position": position}
        new = insert("prompts", prompt_id=prompt_id, mode=mode, input=to_column(content or {}), **where)
        with self._mutex:
            self._check_usable()
            assert prompt_id not in self._pending, f"prompt {prompt_id} is pending already"
            self._pending[prompt_id] = mode
            if prompt_id in self._reopenable:
                self._reopenable.discard(prompt_id)
                again = "UPDATE prompts SET state = 'pending', train_step = NULL WHERE prompt_id = ?"
                return self._writer.put(Statement(again, (prompt_id,)))
            return self._writer.put(new)

    def end_prompts(
        self, prompt_ids: Iterable[str], state: PromptState, *, reason: str | None = None, train_step: int
    ) -> Future[object]:
        """Give pending prompts and their newest groups their end, all in one transaction.

        `train_step` is the step that trained them, or gave them up. `filtered`, `dropped` and `stale` need a reason.
        AssertionError if a prompt is not pending.
        """
        ids = list(prompt_ids)
        assert state != "pending", "a prompt cannot end as pending"
        assert reason or state in _FINAL_WITHOUT_REASON, f"prompts end as {state} without a reason"
        with self._mutex:
            self._check_usable()
            assert len(set(ids)) == len(ids), f"a prompt is named twice in {ids}"
            for prompt_id in ids:
                assert prompt_id in self._pending, f"prompt {prompt_id} is not pending: unknown, or ended already"
            ended: list[tuple[object, ...]] = []
            for prompt_id in ids:
                del self._pending[prompt_id]
                for group_id in self._groups_of.pop(prompt_id, ()):
                    del self._groups[group_id]
                    ended.append((train_step, group_id))
            rows = [(state, reason and safe_text(reason), train_step, prompt_id) for prompt_id in ids]

            def write(conn: sqlite3.Connection) -> None:
                pending = "prompt_id = ? AND state = 'pending'"
                _set_each(conn, f"UPDATE prompts SET state = ?, reason = ?, train_step = ? WHERE {pending}", rows)
                _set_each(conn, "UPDATE groups SET train_step = ? WHERE group_id = ?", ended)

            return self._writer.put(write)

    # Groups and sessions

    def start_group(
        self, group_id: str, *, prompt_id: str, n: int, start_step: int, attempt: int = 0
    ) -> Future[object]:
        """A pending prompt gets a group of `n` slots in rollout step `start_step`. The mode is the prompt's."""
        assert n >= 1 and attempt >= 0, f"group {group_id}: n {n}, attempt {attempt}"
        with self._mutex:
            self._check_usable()
            assert group_id not in self._groups, f"group {group_id} was started already"
            mode = self._pending.get(prompt_id)
            assert mode is not None, f"group {group_id}: prompt {prompt_id} is not pending"
            self._groups[group_id] = (prompt_id, mode, n)
            self._groups_of.setdefault(prompt_id, []).append(group_id)
            counts = {"n": n, "start_step": start_step, "attempt": attempt}
            return self._writer.put(insert("groups", group_id=group_id, prompt_id=prompt_id, mode=mode, **counts))

    def start_session(self, session_id: str, *, group_id: str, slot: int, try_index: int = 0) -> Future[object]:
        """A session starts in a slot of a started group; a retry is a new session in the same slot."""
        started_s = self._clock.wall_s()
        assert session_id == safe_text(session_id), f"session id {session_id!r} is no valid text"
        with self._mutex:
            self._check_usable()
            assert session_id not in self._running, f"session {session_id} is running already"
            assert group_id in self._groups, (
                f"session {session_id}: group {group_id} was not started, or its prompt ended"
            )
            _, mode, n = self._groups[group_id]
            assert 0 <= slot < n and try_index >= 0, f"session {session_id}: slot {slot} of {n}, try {try_index}"
            self._running[session_id] = (group_id, mode)
            place = {"group_id": group_id, "slot": slot, "try_index": try_index}
            row = insert("sessions", session_id=session_id, mode=mode, started_s=started_s, **place)
            return self._writer.put(row)

    def end_session(self, record: SessionRow) -> Future[object]:
        """Write a session that ended: its row, nodes, requests, attempts and samples, all or nothing.

        AssertionError on the Future if a sample is not what its lineage of nodes says.
        """
        where = f"session {record.session_id}"
        assert record.status != "running", f"{where} cannot end as running"
        assert bool(record.samples) == (record.status == "exported"), (
            f"{where} is {record.status} with {len(record.samples)} samples"
        )
        assert record.reason or record.status == "exported", f"{where} is {record.status} without a reason"
        assert record.reward is None or math.isfinite(record.reward), f"{where}: reward {record.reward}"
        for sample in record.samples:
            assert sample.session_id == record.session_id and sample.group_id == record.group_id, (
                f"{where} holds a sample of session {sample.session_id}, group {sample.group_id}"
            )
        ended_s = self._clock.wall_s()
        with self._mutex:
            self._check_usable()
            assert self._running.get(record.session_id) == (record.group_id, record.mode), (
                f"{where} is not running in group {record.group_id} as {record.mode}"
            )
            del self._running[record.session_id]
            return self._writer.put(lambda conn: insert_session_rows(conn, record, ended_s))

    def set_credits(self, samples: Iterable[TrainingSample]) -> Future[object]:
        """Write the credits of contexts of ended sessions, in one transaction. Those without credit are passed over."""
        rows: list[tuple[object, ...]] = []
        for sample in samples:
            if sample.credit is None:
                continue
            each = None if sample.response_credits is None else to_column(list(sample.response_credits))
            name = None if sample.name is None else safe_text(sample.name)
            rows.append((sample.credit, each, sample.session_id, name))
        return self._submit(
            lambda conn: _set_each(
                conn, "UPDATE samples SET credit = ?, response_credits = ? WHERE session_id = ? AND name IS ?", rows
            )
        )

    def event(self, kind: str, detail: object = None) -> Future[object]:
        """Keep a fact that belongs to no session, such as the start of the run."""
        return self._submit(insert("events", at_s=self._clock.wall_s(), kind=kind, detail=to_column(detail)))

    # The file

    def flush_future(self) -> Future[object]:
        """Done when everything called before is on the disk, safe from a power cut too."""
        return self._submit(lambda _: None, durable=True)

    def flush(self, timeout_s: float | None = None) -> None:
        """Block until all that was called before is on the disk."""
        self.flush_future().result(timeout_s)

    def recover(self, *, train_step: int) -> Recovered:
        """Bring the ledger of a run that stopped to the state of a checkpoint taken after train step `train_step`.

        Sessions that were running end as cancelled, reason `interrupted`. Prompts whose end was recorded for a later
        step are pending again, reason `rolled_back`. Eval prompts are not resumed: open ones are dropped as
        `interrupted`, those of later steps as `rolled_back`; either may be issued again. Blocks; one transaction.
        """
        now_s = self._clock.wall_s()
        with self._mutex:
            assert not self._recovered, "recover is the first call after open_existing, and the only one"
            self._recovered = True
            self._check_usable()
            found: list[tuple[Recovered, set[str]]] = []
            written = self._writer.put(lambda conn: found.append(_recover(conn, train_step, now_s)), durable=True)
        written.result()
        ((recovered, reopenable),) = found
        with self._mutex:
            self._pending = {prompt.prompt_id: "train" for prompt in recovered.pending}
            self._reopenable = reopenable
        return recovered

    def close(self) -> None:
        """Write what is queued, end the thread, release the file. Raises if a write failed. May be called twice."""
        with self._mutex:
            first, self._closed = not self._closed, True
        self._writer.close()
        if first:
            self._writer.check()

    def _check_usable(self) -> None:
        assert not self._closed, "the run ledger is closed"
        assert self._recovered, "recover is the first call after open_existing"
        self._writer.check()

    def _submit(self, write: Callable[[sqlite3.Connection], object], *, durable: bool = False) -> Future[object]:
        with self._mutex:
            self._check_usable()
            return self._writer.put(write, durable=durable)


def _set_each(conn: sqlite3.Connection, sql: str, rows: Iterable[tuple[object, ...]]) -> None:
    """Run an UPDATE per row; each must change exactly one."""
    for row in rows:
        changed = conn.execute(sql, row).rowcount
        assert changed == 1, f"{changed} rows changed, not 1, by {row}"


def _recover(conn: sqlite3.Connection, train_step: int, now_s: float) -> tuple[Recovered, set[str]]:
    num_interrupted = conn.execute(
        "UPDATE sessions SET status = 'cancelled', reason = 'interrupted', ended_s = ? WHERE status = 'running'",
        (now_s,),
    ).rowcount
    num_rolled_back = conn.execute(
        "UPDATE prompts SET state = 'pending', reason = 'rolled_back', train_step = NULL "
        "WHERE mode = 'train' AND train_step > ?",
        (train_step,),
    ).rowcount
    conn.execute(
        "UPDATE prompts SET reason = CASE state WHEN 'pending' THEN 'interrupted' ELSE 'rolled_back' END, "
        "state = 'dropped', train_step = coalesce(train_step, ?) "
        "WHERE mode = 'eval' AND (state = 'pending' OR train_step > ?)",
        (train_step, train_step),
    )
    reopenable = conn.execute(
        "SELECT prompt_id FROM prompts WHERE mode = 'eval' AND state = 'dropped' "
        "AND reason IN ('interrupted', 'rolled_back')"
    ).fetchall()
    pending = conn.execute(
        "SELECT prompt_id, epoch, row, position, "
        "(SELECT count(*) FROM groups g WHERE g.prompt_id = p.prompt_id) FROM prompts p "
        "WHERE mode = 'train' AND state = 'pending' ORDER BY position"
    ).fetchall()
    (last,) = conn.execute("SELECT max(position) FROM prompts WHERE mode = 'train'").fetchone()
    recovered = Recovered(
        pending=[
            PendingPrompt(prompt_id=prompt_id, epoch=epoch, row=row, position=position, num_groups=num_groups)
            for prompt_id, epoch, row, position, num_groups in pending
        ],
        next_position=0 if last is None else last + 1,
        num_interrupted=num_interrupted,
        num_rolled_back=num_rolled_back,
    )
    return recovered, {prompt_id for (prompt_id,) in reopenable}
