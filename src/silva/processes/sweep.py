"""Finds the processes of agents in /proc, however they were forked, and ends them.

An agent's launcher and all its descendants inherit two environment variables: the run's marker and the session's id. A
process belongs to a session if one of these is true:

    it is the launcher
    its Unix session is the launcher's                            (sleep 600 &)
    its parent belonged to the session when it was first seen     (setsid sleep 600 &)
    its environment has both variables                            ((setsid sleep 600 &) &)

A process that clears its environment *and* leaves the Unix session *and* loses its parent before the first look is not
found.

Each process is read once: a `/proc` entry keeps its inode number as long as the process lives, so a later sweep costs
one directory listing. Before every signal the start time is checked under a pidfd, so a reused pid is never hit. On
systems without Linux's /proc the tables stay empty and only process groups are ended.

Standard library only: the runner imports this.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping

RUN_MARKER = "SILVA_RUN_ID"
SESSION_MARKER = "RELAX_SESSION_ID"
LINUX = sys.platform.startswith("linux")

_LOOKS = 8
"""Number of reads of a process whose environment is empty or unreadable: it may be inside an exec."""
_MAX_ENVIRON = 8 << 20
_PROC_DIR = "/proc"

Stat = namedtuple("Stat", "state ppid pgrp sid start")


class Proc:
    """One process."""

    __slots__ = ("inode", "looks", "owner", "pgrp", "pid", "start", "term_sent")

    def __init__(self, pid: int, inode: int) -> None:
        self.pid = pid
        self.inode = inode
        self.start = 0
        """Clock ticks from boot to its start: with the pid, its identity."""
        self.pgrp = 0
        self.owner: str | None = None
        """Session id, "" for a process of the run without a known session, None for a stranger."""
        self.looks = _LOOKS
        """Reads that are left; 0 once its owner is settled."""
        self.term_sent = False


class ProcTable:
    """The processes of the machine and their owners, kept between sweeps.

    `spare`: pids that never get an owner (the sweeper itself and its ancestors).
    """

    def __init__(self, run_id: str, *, spare: Iterable[int] = ()) -> None:
        self._marker = os.fsencode(f"{RUN_MARKER}={run_id}")
        self._spare = frozenset(spare)
        self._procs: dict[int, Proc] = {}
        self._owned: dict[str, list[Proc]] = {}
        self.orphans_of: int | None = None
        """A pid whose children, except launchers, count as processes of the run; None for no such pid."""

    def refresh(self, launchers: Mapping[int, str] | None = None) -> None:
        """List /proc and read every process that is new. `launchers` maps launcher pid to session id."""
        launchers = launchers or {}
        known, procs = self._procs, {}
        owned: dict[str, list[Proc]] = {}
        for pid, inode in _list_pids():
            proc = known.get(pid)
            if proc is None or proc.inode != inode:
                proc = Proc(pid, inode)
            procs[pid] = proc
            if proc.looks:
                self._look(proc, procs, launchers)
            if proc.owner is not None:
                owned.setdefault(proc.owner, []).append(proc)
        self._procs, self._owned = procs, owned

    def forget(self) -> None:
        """Read every stranger again at the next refresh."""
        self._procs = {pid: proc for pid, proc in self._procs.items() if proc.owner is not None}

    def owners(self) -> list[str]:
        """Return the sessions with at least one process in the last listing ("" for processes without a session)."""
        return list(self._owned)

    def alive(self, owner: str) -> list[Proc]:
        """Return the session's processes that live now, without zombies."""
        living: list[Proc] = []
        for proc in self._owned.get(owner, ()):
            stat = read_stat(proc.pid)
            if stat is not None and stat.start == proc.start and stat.state not in "ZX":
                proc.pgrp = stat.pgrp
                living.append(proc)
        return living

    def _look(self, proc: Proc, procs: Mapping[int, Proc], launchers: Mapping[int, str]) -> None:
        stat = read_stat(proc.pid)
        if stat is None or proc.pid in self._spare:
            proc.looks = 0
            return
        proc.start, proc.pgrp = stat.start, stat.pgrp
        proc.looks -= 1
        parent = procs.get(stat.ppid)
        if proc.pid in launchers:
            proc.owner = launchers[proc.pid]
        elif stat.sid in launchers:
            proc.owner = launchers[stat.sid]
        elif parent is not None and parent.owner:
            proc.owner = parent.owner
        else:
            environ = _read_environ(proc.pid)
            if environ:
                proc.owner = owner_in(environ, self._marker)
                proc.looks = 0
            if proc.owner is None and stat.ppid == self.orphans_of:
                proc.owner = ""
        if proc.owner is not None:
            proc.looks = 0


def owner_in(environ: bytes, marker: bytes) -> str | None:
    """Return the session that an environment block names: None without the run's marker, "" with the marker alone."""
    if marker not in environ:
        return None
    entries = environ.split(b"\0")
    if marker not in entries:
        return None
    prefix = f"{SESSION_MARKER}=".encode()
    for entry in entries:
        if entry.startswith(prefix):
            return os.fsdecode(entry[len(prefix) :])
    return ""


def read_stat(pid: int) -> Stat | None:
    """Return state, parent, group, Unix session and start time of a process; None if there is none."""
    raw = _read(f"{_PROC_DIR}/{pid}/stat", 4096)
    if not raw:
        return None
    # the command name may contain blanks and brackets; the fields begin after its last bracket
    fields = raw[raw.rfind(b")") + 2 :].split()
    return Stat(fields[0].decode("ascii"), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def children_of_self() -> list[int]:
    """Return the direct children of this process, including zombies and adopted ones."""
    me = os.getpid()
    raw = _read(f"{_PROC_DIR}/self/task/{me}/children", 1 << 20)
    if raw is not None:
        return [int(pid) for pid in raw.split()]
    return [pid for pid, _ in _list_pids() if (stat := read_stat(pid)) is not None and stat.ppid == me]


def send_signal(proc: Proc, signum: int) -> bool:
    """Signal this process, never another one that got its pid since. False if it is gone or not ours to signal."""
    try:
        fd = os.pidfd_open(proc.pid)
    except ProcessLookupError:
        return False
    except OSError:
        fd = -1  # no pidfd on this kernel, or no free descriptor: the check below still helps
    try:
        stat = read_stat(proc.pid)
        if stat is None or stat.start != proc.start:
            return False
        if fd >= 0:
            signal.pidfd_send_signal(fd, signum)
        else:
            os.kill(proc.pid, signum)
        return True
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        if fd >= 0:
            os.close(fd)


def send_group(pgid: int, signum: int) -> None:
    """Signal a process group. Its leader must not be reaped yet, or the number may be another group's."""
    try:
        os.killpg(pgid, signum)
    except (ProcessLookupError, PermissionError):
        pass


def sweep_run(run_id: str, *, grace_s: float = 1.0, limit_s: float = 10.0, pause_s: float = 0.1) -> int:
    """End every process that carries the run's marker: TERM, `grace_s`, KILL, until two looks in a row find none.

    Blocks for at most `grace_s + limit_s`. Only for a run whose runner is dead. Returns how many processes are left.
    """
    table = ProcTable(run_id, spare=_own_line())
    kill_at = time.monotonic() + grace_s
    clean_looks, left = 0, 0
    while clean_looks < 2:
        table.refresh()
        alive = [proc for owner in table.owners() for proc in table.alive(owner)]
        left = len(alive)
        clean_looks = 0 if alive else clean_looks + 1
        now = time.monotonic()
        if now > kill_at + limit_s:
            break
        for proc in alive:
            end_process(proc, kill=now >= kill_at)
        if clean_looks < 2:
            time.sleep(pause_s)
    return left


def end_process(proc: Proc, *, kill: bool) -> None:
    """TERM once, or KILL."""
    if kill:
        send_signal(proc, signal.SIGKILL)
    elif not proc.term_sent:
        proc.term_sent = True
        send_signal(proc, signal.SIGTERM)


def _own_line() -> set[int]:
    """Return this process and its ancestors."""
    line: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in line:
        line.add(pid)
        stat = read_stat(pid)
        pid = stat.ppid if stat is not None else 0
    return line


def _list_pids() -> Iterator[tuple[int, int]]:
    """Yield (pid, inode number of its /proc entry) of every process."""
    if not LINUX:
        return
    with os.scandir(_PROC_DIR) as entries:
        for entry in entries:
            if entry.name.isdigit():
                yield int(entry.name), entry.inode()


def _read_environ(pid: int) -> bytes:
    return _read(f"{_PROC_DIR}/{pid}/environ", _MAX_ENVIRON) or b""


def _read(path: str, limit: int) -> bytes | None:
    """Return up to `limit` bytes of a /proc file; None if the process is gone or we may not read it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    parts: list[bytes] = []
    try:
        while limit > 0:
            part = os.read(fd, min(limit, 1 << 16))
            if not part:
                break
            parts.append(part)
            limit -= len(part)
    except OSError:
        return None
    finally:
        os.close(fd)
    return b"".join(parts)
