"""The process that owns all agents (another one owns the workers of user functions): starts them, reports their ends,
and leaves none behind.

Contract. Consumes: `start` and `kill` messages (see `frames`) on descriptor 0. Produces: one `exit` (or `start_failed`)
and one `gone` per session. Woken by: a message, SIGCHLD, SIGTERM, the next sweep, and once a second to see whether the
trainer still lives. It ends when the stream ends, the trainer dies or SIGTERM comes, after it has ended every agent.

A session is over when its launcher exits. The exit is reported at once. Then the rest of its processes get TERM and,
after the grace, KILL, in sweeps, until two sweeps in a row find none. Until then the launcher stays an unreaped zombie,
so that no other process can get its process group's number. The runner is a child-subreaper: orphans of a session
become its children.

Standard library only, without its heavier parts: this process starts in a few hundredths of a second and stays small.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence

from silva.processes import sweep
from silva.processes.frames import FrameBuffer, Message, pack

CONTROL_FD = 0
_SHUTDOWN_GRACE_S = 2.0
"""Most seconds between TERM and KILL once the trainer is gone: nobody waits for the agents any more."""
_GIVE_UP_S = 10.0
"""Seconds after the first KILL at which a process that is still there (uninterruptible, another user's) is reported."""
_CLEAN_SWEEPS = 2
_AFTERWATCH_S = 2.0
"""Seconds that sweeps go on after the last session is gone, to find a fork that the listing missed."""
_SWEEP_SHARE = 10
"""Sweeps that cost t CPU seconds begin at least this many times t apart: at most a tenth of a core."""
_IDLE_S = 1.0
"""Seconds between rounds when nothing wakes the runner."""
_PR_SET_CHILD_SUBREAPER = 36
_CAN_PEEK = hasattr(os, "waitid")
_DEFAULT_SIGNALS = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD]


class StartError(Exception):
    """An agent could not be started; the text says why and what to do."""


class OwnedProcess:
    """One launcher and its end."""

    def __init__(self, session_id: str, pid: int) -> None:
        self.id = session_id
        self.pid = pid
        self.exited = False
        """The launcher ended; other processes of the session may be left."""
        self.killed = False
        """Its end was asked for before it came."""
        self.kill_at: float | None = None
        """Monotonic time of KILL; None while nothing asked for its end."""
        self.clean_sweeps = 0
        """Sweeps in a row that found no process of it."""


class RunnerProgram:
    """All state of the runner process. Single-threaded: nothing else runs while an agent is started or swept."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._grace_s = 5.0
        self._sweep_s = 0.25
        self._table = sweep.ProcTable("")
        self._sessions: dict[str, OwnedProcess] = {}
        self._launchers: dict[int, str] = {}
        self._frames = FrameBuffer()
        self._out = bytearray()
        self._child_ended = False
        self._term_asked = False
        self._next_reap = 0.0
        self._next_sweep = 0.0
        self._sweep_until = 0.0
        self._shutdown_until: float | None = None
        self._clean_final_sweeps = 0
        self._wake_fd, wake_write_fd = os.pipe()
        for fd in (self._wake_fd, wake_write_fd, CONTROL_FD):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.set_wakeup_fd(wake_write_fd, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until there is nobody to serve and nothing left to end."""
        try:
            while not self._done():
                self._round()
        finally:
            # an error of ours leaves through here too: the agents still end
            self._begin_shutdown()
            while not self._done():
                self._round()

    def _round(self) -> None:
        self._wait()
        if self._child_ended or time.monotonic() >= self._next_reap:
            self._reap()
        if self._term_asked or os.getppid() != self._parent:
            self._begin_shutdown()
        if self._sweeps_wanted() and time.monotonic() >= self._next_sweep:
            self._sweep()
        self._flush()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        wanted = (select.POLLIN if self._shutdown_until is None else 0) | (select.POLLOUT if self._out else 0)
        if wanted:
            poll.register(CONTROL_FD, wanted)
        timeout_s = _IDLE_S
        if self._child_ended:
            timeout_s = 0.0
        elif self._sweeps_wanted():
            timeout_s = min(_IDLE_S, max(0.0, self._next_sweep - time.monotonic()))
        ready = {fd for fd, _ in poll.poll(timeout_s * 1000)}
        if self._wake_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_fd, 4096)
        if CONTROL_FD in ready and self._shutdown_until is None:
            self._read_control()

    def _read_control(self) -> None:
        try:
            data = os.read(CONTROL_FD, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._begin_shutdown()
        for message in self._frames.feed(data):
            if self._shutdown_until is None:
                self._handle(message)

    def _handle(self, message: Message) -> None:
        match message:
            case ("start", str(session_id), list(argv), str(cwd), dict(env), str(log)):
                self._start(session_id, argv, cwd=cwd, env=env, log=log)
            case ("kill", str(session_id)):
                session = self._sessions.get(session_id)
                if session is not None and not session.exited:
                    session.killed = True
                    self._stop(session, self._grace_s)
            case ("hello", str(run_id), int(parent_pid), float(grace_s), float(sweep_s)):
                self._grace_s, self._sweep_s = grace_s, sweep_s
                self._table = sweep.ProcTable(run_id, spare=(os.getpid(), self._parent))
                if self._parent != parent_pid:
                    self._begin_shutdown()
                self._send("ready", os.getpid())
            case _:
                raise AssertionError(f"unknown message {message!r}")

    # -- one session ------------------------------------------------------------------------------------------------

    def _start(self, session_id: str, argv: list[str], *, cwd: str, env: Mapping[str, str], log: str) -> None:
        assert session_id not in self._sessions, f"session {session_id} runs already"
        try:
            pid = spawn(argv, cwd=cwd, env=env, log=log)
        except StartError as error:
            self._send("start_failed", session_id, str(error))
            self._send("gone", session_id, 0)
            return
        self._sessions[session_id] = OwnedProcess(session_id, pid)
        self._launchers[pid] = session_id
        self._send("started", session_id, pid)

    def _stop(self, session: OwnedProcess, grace_s: float) -> None:
        """TERM to the group now, to what left the group at the next sweep, KILL to both after the grace."""
        kill_at = time.monotonic() + grace_s
        if session.kill_at is None:
            sweep.send_group(session.pid, signal.SIGTERM)
            session.kill_at = kill_at
        session.kill_at = min(session.kill_at, kill_at)

    def _reap(self) -> None:
        self._child_ended = False
        self._next_reap = time.monotonic() + _IDLE_S
        for session in list(self._sessions.values()):
            if session.exited:
                continue
            end = _peek_exit(session.pid)
            if end is not None:
                self._on_exit(session, *end)
        for pid in sweep.children_of_self():
            if pid not in self._launchers:
                _reap_pid(pid)

    def _on_exit(self, session: OwnedProcess, code: int | None, signum: int | None) -> None:
        session.exited = True
        self._send("exit", session.id, code, signum, session.killed)
        self._stop(session, self._grace_s)

    def _finish(self, session: OwnedProcess, survivors: int) -> None:
        if _CAN_PEEK:
            _reap_pid(session.pid)
        del self._sessions[session.id]
        del self._launchers[session.pid]
        self._sweep_until = time.monotonic() + _AFTERWATCH_S
        self._send("gone", session.id, survivors)

    # -- sweeps -----------------------------------------------------------------------------------------------------

    def _sweeps_wanted(self) -> bool:
        if self._shutdown_until is not None or time.monotonic() < self._sweep_until:
            return True
        return any(session.kill_at is not None for session in self._sessions.values())

    def _sweep(self) -> None:
        began, cpu_began = time.monotonic(), time.process_time()
        if self._shutdown_until is not None:
            self._table.forget()
        self._table.refresh(self._launchers)
        for session in list(self._sessions.values()):
            if session.kill_at is not None:
                self._sweep_session(session, session.kill_at, began)
        strays = self._sweep_strays(began)
        if self._shutdown_until is not None:
            self._clean_final_sweeps = 0 if strays or self._sessions else self._clean_final_sweeps + 1
        self._next_sweep = began + max(self._sweep_s, _SWEEP_SHARE * (time.process_time() - cpu_began))

    def _sweep_session(self, session: OwnedProcess, kill_at: float, now: float) -> None:
        kill = now >= kill_at
        alive = self._table.alive(session.id)
        if kill and (alive or not sweep.LINUX):
            sweep.send_group(session.pid, signal.SIGKILL)
        for proc in alive:
            # the group has had its TERM; programs may take a second one as an order to drop everything
            if kill or proc.pgrp != session.pid:
                sweep.end_process(proc, kill=kill)
        if not session.exited:
            return
        # without /proc we only know that the group got its KILL
        clean = not alive if sweep.LINUX else kill
        session.clean_sweeps = session.clean_sweeps + 1 if clean else 0
        if session.clean_sweeps >= _CLEAN_SWEEPS:
            self._finish(session, 0)
        elif now >= kill_at + _GIVE_UP_S:
            self._finish(session, len(alive))

    def _sweep_strays(self, now: float) -> int:
        """KILL processes of sessions that are not running (any more); at shutdown also those without a session."""
        num_strays = 0
        for owner in self._table.owners():
            if owner in self._sessions or (not owner and self._shutdown_until is None):
                continue
            for proc in self._table.alive(owner):
                num_strays += 1
                sweep.end_process(proc, kill=True)
        if num_strays:
            self._sweep_until = now + _AFTERWATCH_S
        return num_strays

    # -- the end ----------------------------------------------------------------------------------------------------

    def _begin_shutdown(self) -> None:
        if self._shutdown_until is not None:
            return
        grace_s = min(self._grace_s, _SHUTDOWN_GRACE_S)
        self._shutdown_until = time.monotonic() + grace_s + _GIVE_UP_S + 1.0
        self._table.orphans_of = os.getpid()
        for session in self._sessions.values():
            session.killed = session.killed or not session.exited
            self._stop(session, grace_s)
        self._next_sweep = time.monotonic()
        self._send("closing")

    def _done(self) -> bool:
        if self._shutdown_until is None:
            return False
        return self._clean_final_sweeps >= _CLEAN_SWEEPS or time.monotonic() > self._shutdown_until

    # -- small parts ------------------------------------------------------------------------------------------------

    def _send(self, *message: object) -> None:
        self._out += pack(*message)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: os.write(CONTROL_FD, self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()  # the trainer is gone

    def _on_signal(self, signum: int, _frame: object) -> None:
        self._child_ended = self._child_ended or signum == signal.SIGCHLD
        self._term_asked = self._term_asked or signum == signal.SIGTERM


def spawn(argv: list[str], *, cwd: str, env: Mapping[str, str], log: str) -> int:
    """Start a program as leader of a Unix session of its own; returns its pid.

    Input is /dev/null; output and errors are appended to the file `log`. Nothing else is inherited but limits and
    umask. No Python code runs between fork and exec. Raises StartError.
    """
    try:
        log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except (OSError, ValueError) as error:
        raise StartError(f"the log {log!r} cannot be opened: {_why(error)}") from error
    try:
        os.chdir(cwd)
    except (OSError, ValueError) as error:
        os.close(log_fd)
        raise StartError(
            f"the working directory {cwd!r} cannot be entered: {_why(error)}; check --agent-cwd"
        ) from error
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, log_fd, 1),
        (os.POSIX_SPAWN_DUP2, log_fd, 2),
    ]
    try:
        return os.posix_spawnp(
            argv[0], argv, env, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_DEFAULT_SIGNALS
        )
    except (OSError, ValueError) as error:
        raise StartError(describe_exec_error(error, argv, env)) from error
    finally:
        os.close(log_fd)
        os.chdir("/")


def describe_exec_error(error: OSError | ValueError, argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return why the system did not start the program, and what to do about it."""
    text = f"it cannot be started with {argv[0]!r}: {_why(error)}"
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.ENOENT:
        return f"{text}; install it or put its folder on PATH"
    if code == errno.E2BIG:
        size, name = max(((len(value), name) for name, value in env.items()), default=(0, ""))
        return (
            f"{text}; the command has {len(argv[-1])} characters and the largest variable, {name}, {size}: shorten "
            f"them or start with a cleared environment (--agent-env-clear)"
        )
    if code in (errno.EAGAIN, errno.ENOMEM):
        return f"{text}; the limit on processes or memory is reached (ulimit -u, pids.max): run fewer agents at once"
    return text


def _why(error: OSError | ValueError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _peek_exit(pid: int) -> tuple[int | None, int | None] | None:
    """Return (exit code, signal) of a child that ended, and leave it a zombie; None while it runs.

    If the system cannot look without reaping, the child is reaped, and its group's number may be used again.
    """
    if _CAN_PEEK:
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return None
        return (info.si_status, None) if info.si_code == os.CLD_EXITED else (None, info.si_status)
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        return None
    code = os.waitstatus_to_exitcode(status)
    return (code, None) if code >= 0 else (None, -code)


def _reap_pid(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def main() -> None:
    if sweep.LINUX:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of this process's tree come to it
    RunnerProgram().run()
