"""The thread that writes the run ledger: what is queued together shares a transaction, in the order of the calls.

put(a) put(b) put(c, durable)  ->  BEGIN  a  b  c  COMMIT  fsync  ->  the three Futures are done
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from silva.store.files import DB_NAME, LedgerError, lock_run, open_writer

_GATHER_S = 0.1
"""Calls within this time share a transaction. A caller that waits for the disk ends the wait early."""
_MAX_BATCH = 256
_OUR_MISTAKES = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.DataError)


@dataclass(frozen=True, slots=True)
class _Job:
    write: Callable[[sqlite3.Connection], object]
    done: Future[object]
    durable: bool = False


@dataclass(frozen=True, slots=True)
class Statement:
    """A write of one statement, which is all or nothing by itself: it needs no savepoint."""

    sql: str
    values: tuple[object, ...]

    def __call__(self, conn: sqlite3.Connection) -> None:
        conn.execute(self.sql, self.values)


def insert(table: str, **row: object) -> Statement:
    """A new row, by its columns; the other columns have their defaults."""
    marks = ", ".join("?" * len(row))
    return Statement(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))


class LedgerWriter:
    """Owns the connection, its thread and the lock of the run folder.

    Consumes queued writes; waits for calls; produces transactions. The first write that fails is the last: its Future
    and all later ones raise, and so does `check`.
    """

    def __init__(self, run_dir: Path, busy_timeout_s: float, *, resume: bool):
        """Raises LedgerError where the file cannot be used."""
        self.path = run_dir / DB_NAME
        self._lock_file = lock_run(run_dir, must_exist=resume)
        try:
            self._conn = open_writer(self.path, busy_timeout_s, resume=resume)
        except BaseException:
            self._lock_file.close()
            raise
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._urgent = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="silva-ledger", daemon=True)
        self._thread.start()

    def put(self, write: Callable[[sqlite3.Connection], object], *, durable: bool = False) -> Future[object]:
        """Queue a write. `durable`: its Future is done when the write is safe from a power cut."""
        done: Future[object] = Future()
        done.set_running_or_notify_cancel()  # a caller that stops waiting must not undo its write
        self._queue.put(_Job(write, done, durable))
        if durable:
            self._urgent.set()
        return done

    def check(self) -> None:
        """Raise what made an earlier write fail."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Write what is queued, end the thread, release the file. May be called twice."""
        self._queue.put(None)
        self._urgent.set()
        self._thread.join()

    def _serve(self) -> None:
        """Consumes the queue, waits for calls, produces transactions; ended by the None that `close` puts."""
        open_ = True
        while open_:
            batch, open_ = self._next_batch()
            if batch:
                self._write(batch)
        try:
            self._conn.close()
        except sqlite3.Error as error:
            self._fail(error)
        self._lock_file.close()

    def _next_batch(self) -> tuple[list[_Job], bool]:
        batch: list[_Job] = []
        job = self._queue.get()
        if job is not None:
            self._urgent.wait(_GATHER_S)
        self._urgent.clear()  # before the queue is emptied: what comes later sets it again
        while job is not None:
            batch.append(job)
            if len(batch) == _MAX_BATCH:
                return batch, True
            try:
                job = self._queue.get_nowait()
            except Empty:
                return batch, True
        return batch, False

    def _write(self, batch: list[_Job]) -> None:
        """One transaction. Jobs before a failing one are kept, it and all later ones fail."""
        results: list[object] = []
        if self._failure is None:
            try:
                self._conn.execute("BEGIN IMMEDIATE")
                for job in batch:
                    if isinstance(job.write, Statement):
                        results.append(job.write(self._conn))
                        continue
                    self._conn.execute("SAVEPOINT job")
                    results.append(job.write(self._conn))
                    self._conn.execute("RELEASE job")
            except Exception as error:  # noqa: BLE001 - whatever a write raises belongs to its caller, not to this thread
                self._fail(error)
                self._undo_job()
            results = results if self._commit(durable=any(job.durable for job in batch)) else []
        for index, job in enumerate(batch):
            if index < len(results):
                job.done.set_result(results[index])
            else:
                job.done.set_exception(self._failure)

    def _undo_job(self) -> None:
        try:
            if self._conn.in_transaction:
                self._conn.execute("ROLLBACK TO job")
        except sqlite3.Error as error:  # no savepoint yet, or SQLite undid the whole transaction itself
            self._fail(error)

    def _commit(self, *, durable: bool) -> bool:
        """Whether the jobs that ran are in the file."""
        if not self._conn.in_transaction:
            return False
        try:
            self._conn.execute("COMMIT")
            if durable:
                self._sync()
        except (sqlite3.Error, OSError) as error:
            self._fail(error)
            if self._conn.in_transaction:
                self._conn.execute("ROLLBACK")
            return False
        return True

    def _sync(self) -> None:
        """WAL with synchronous NORMAL leaves commits to the system's cache; this waits for the disk."""
        wal = self.path.with_name(DB_NAME + "-wal")
        with suppress(FileNotFoundError), wal.open("rb") as file:  # no log: all of it is in the database already
            os.fsync(file.fileno())

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None:
            return
        if isinstance(error, sqlite3.DatabaseError | OSError) and not isinstance(error, _OUR_MISTAKES):
            self._failure = LedgerError(
                f"the run ledger {self.path} cannot be written: {error}. Nothing after this point is recorded. "
                f"Make room (or end the other program that locks the file), then go on with --resume {self.path.parent}"
            )
        else:
            self._failure = AssertionError(
                f"the run ledger {self.path} refused a record: {type(error).__name__}: {error}"
            )
        self._failure.__cause__ = error
