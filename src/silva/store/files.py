"""Files of a run: the lock and the schema of the ledger, and files that appear whole or not at all."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from silva.types import SilvaError

DB_NAME = "run.db"
LOCK_NAME = "run.lock"
SCHEMA_VERSION = 3


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that is at `path`, on the disk, when the block ends; where the block fails, nothing is."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(partial).chmod(0o644)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


class LedgerError(SilvaError):
    """The ledger file cannot be opened, read or written."""


def lock_run(run_dir: Path, *, must_exist: bool) -> IO[str]:
    """Lock the run directory for this process. The system releases it when the process ends, however it ends."""
    if must_exist and not (run_dir / DB_NAME).exists():
        raise LedgerError(f"{run_dir} holds no {DB_NAME}: there is no run to go on with. Check the path after --resume")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = (run_dir / LOCK_NAME).open("a+")
    except OSError as error:
        raise LedgerError(f"the run directory {run_dir} cannot be used: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise LedgerError(
            f"another process (pid {holder}) writes to the run in {run_dir}; "
            "wait for it or end it, or use another --run-dir"
        ) from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def open_writer(path: Path, busy_timeout_s: float, *, resume: bool) -> sqlite3.Connection:
    """A connection with the schema in place, or LedgerError."""
    conn: sqlite3.Connection | None = None
    try:
        conn = sqlite3.connect(path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False)
        version = schema_version(conn, path)
        if resume and version is None:
            raise LedgerError(f"{path} is an empty ledger: that run stopped while it started. Start it anew")
        if not resume and version is not None and _has_begun(conn):
            raise LedgerError(
                f"{path} holds a run already. Use another --run-dir; a stopped training run goes on by "
                f"silva train --resume {path.parent}"
            )
        (journal,) = conn.execute("PRAGMA journal_mode = WAL").fetchone()
        if journal != "wal":
            raise LedgerError(f"{path}: this file system cannot hold a write-ahead log; put --run-dir on a local disk")
        conn.execute("PRAGMA synchronous = NORMAL")
        conn.execute("PRAGMA foreign_keys = ON")
        if version is None:
            schema = Path(__file__).with_name("schema.sql").read_text(encoding="utf-8")
            conn.executescript(f"BEGIN IMMEDIATE;\n{schema}\nCOMMIT;")
    except (sqlite3.Error, LedgerError) as error:
        if conn is not None:
            conn.close()
        if isinstance(error, LedgerError):
            raise
        raise unreadable(path, error) from error
    return conn


def _has_begun(conn: sqlite3.Connection) -> bool:
    """A start that failed on an option leaves an empty ledger, which the next start may take."""
    return any(conn.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() for table in ("events", "prompts", "sessions"))


def schema_version(conn: sqlite3.Connection, path: Path) -> int | None:
    """The schema version of a ledger file, None where it has no table yet. LedgerError if we cannot use it."""
    tables = {name for (name,) in conn.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return None
    if "schema_version" not in tables:
        raise LedgerError(f"{path} is a database, but not a run ledger of Silva: it holds no table schema_version")
    row = conn.execute("SELECT version FROM schema_version").fetchone()
    if row is None or row[0] != SCHEMA_VERSION:
        found = None if row is None else row[0]
        raise LedgerError(
            f"{path} is a run ledger of schema version {found}; this Silva reads and writes version {SCHEMA_VERSION}. "
            "Use the Silva that wrote it, or a newer one"
        )
    return row[0]


def unreadable(path: Path, error: Exception) -> LedgerError:
    """The LedgerError for what is wrong with the content of a file."""
    return LedgerError(f"{path} cannot be read as a run ledger: {error}. If it was copied, copy {DB_NAME}-wal with it")
