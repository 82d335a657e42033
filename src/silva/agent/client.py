"""The trainer's side of the runner: start an agent, wait for its end, end it, know when nothing of it is left.

If the runner dies, every waiting agent ends as lost, everything that carries the run's marker is ended from here, and
the next session gets a new runner. Real processes keep real time: the bounds here are wall seconds, not the injected
clock's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import silva
from silva.processes.protocol import Line, decode, encode
from silva.processes.sweep import sweep_run
from silva.types.errors import RunStopped

logger = logging.getLogger("silva.agent")

_READY_TIMEOUT_S = 30.0
_MARGIN_S = 30.0
"""Added to the grace before a runner that does not answer counts as stuck; it gives up on survivors after 10 s."""
_MAX_LINE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSpec:
    """What to start: `bash -c command` in `cwd` with exactly `env`, output appended to `log_path`."""

    session_id: str
    command: str
    cwd: Path | str
    env: Mapping[str, str]
    log_path: Path | str


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentExit:
    """How a launcher ended. Exactly one of these holds: an exit code, a signal, not started (`error`), runner lost.

    `killed` says that the end was asked for before it came; `kill_reason` says by whom.
    """

    exit_code: int | None = None
    signal: int | None = None
    killed: bool = False
    kill_reason: str | None = None
    started: bool = True
    runner_lost: bool = False
    error: str | None = None

    @property
    def ok(self) -> bool:
        """The agent ended by itself with exit status 0."""
        return self.exit_code == 0 and not self.killed

    def describe(self) -> str:
        """The end in words, for an error text."""
        if self.error is not None:
            return self.error
        if self.runner_lost:
            return "the process that owns the agents died, and the agent was ended with it"
        if self.signal is not None:
            how = f"the agent was ended by {_signal_name(self.signal)}"
        else:
            how = f"the agent ended with exit status {self.exit_code}"
        return f"{how} ({self.kill_reason})" if self.killed and self.kill_reason else how


class _Agent:
    """One session's futures and why its end was asked for."""

    __slots__ = ("exit", "gone", "kill_reason", "session_id", "started")

    def __init__(self, session_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.session_id = session_id
        self.exit: asyncio.Future[AgentExit] = loop.create_future()
        self.gone: asyncio.Future[int] = loop.create_future()
        self.kill_reason: str | None = None
        self.started = False


@dataclass(kw_only=True, slots=True)
class _Connection:
    """One life of the runner."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    task: asyncio.Task[None] | None = None
    lost: bool = False


class AgentRunner:
    """Owns the runner process. All methods belong to one event loop. At most one for each `run_id` at a time.

    `grace_s`: seconds between TERM and KILL. `max_losses`: so many runner deaths in a row, without an agent's end
    between them, raise RunStopped. `log_path`: where the runner writes a traceback of its own, if it ever has one.
    """

    def __init__(
        self,
        *,
        run_id: str,
        grace_s: float = 5.0,
        sweep_s: float = 0.25,
        max_losses: int = 5,
        shell: str = "bash",
        log_path: Path | None = None,
    ) -> None:
        self.run_id = run_id
        self.grace_s = grace_s
        self.num_losses = 0
        self._sweep_s = sweep_s
        self._max_losses = max_losses
        self._losses_in_a_row = 0
        self._shell = shell
        self._log_path = log_path
        self._lock = asyncio.Lock()
        self._connection: _Connection | None = None
        self._agents: dict[str, _Agent] = {}
        self._survivors: dict[str, int] = {}
        self._closing = False

    @property
    def pid(self) -> int | None:
        """The runner's process id, None while there is none."""
        return self._connection.process.pid if self._connection is not None else None

    @property
    def num_running(self) -> int:
        """Agents whose launcher has not ended."""
        return sum(not agent.exit.done() for agent in self._agents.values())

    async def start(self) -> None:
        """Start the runner process. Raises RunStopped when that fails."""
        async with self._lock:
            await self._ensure()

    async def run_agent(self, spec: AgentSpec) -> AgentExit:
        """Start an agent and wait until its launcher ends. Cancelling this call ends the agent.

        Raises RunStopped when the runner died `max_losses` times in a row, ValueError for a session that runs already.
        """
        async with self._lock:
            connection = await self._ensure()
            if spec.session_id in self._agents:
                raise ValueError(f"session {spec.session_id} has an agent already")
            agent = _Agent(spec.session_id, asyncio.get_running_loop())
            self._agents[spec.session_id] = agent
            start: Line = {
                "op": "start",
                "session": spec.session_id,
                "command": spec.command,
                "cwd": str(spec.cwd),
                "env": dict(spec.env),
                "log": str(spec.log_path),
            }
            connection.writer.write(encode(start))
        try:
            return await asyncio.shield(agent.exit)
        except asyncio.CancelledError:
            self._request_kill(agent, "cancelled")
            raise

    async def kill(self, session_id: str, reason: str) -> None:
        """Ask for the end of an agent: TERM, grace, KILL. Returns at once; `run_agent` reports the end."""
        agent = self._agents.get(session_id)
        if agent is not None:
            self._request_kill(agent, reason)

    async def session_gone(self, session_id: str) -> bool:
        """Wait until no process of an ended session is left. False when one could not be ended, or not in bounded time.

        True at once for a session that never started.
        """
        agent = self._agents.get(session_id)
        if agent is None:
            return self._survivors.get(session_id, 0) == 0
        await asyncio.wait([agent.exit])
        done, _ = await asyncio.wait([agent.gone], timeout=self.grace_s + _MARGIN_S)
        return bool(done) and agent.gone.result() == 0

    async def close(self) -> None:
        """End all agents and the runner, and wait for both. Bounded by the grace and some seconds."""
        self._closing = True
        async with self._lock:
            connection = self._connection
            if connection is None or connection.task is None:
                return
            for agent in self._agents.values():
                agent.kill_reason = agent.kill_reason or "the run ended"
            if connection.writer.can_write_eof() and not connection.writer.is_closing():
                connection.writer.write_eof()
            done, _ = await asyncio.wait([connection.task], timeout=self.grace_s + _MARGIN_S)
            if not done:
                connection.process.kill()
            await connection.task
            self._connection = None

    # -- one life of the runner -------------------------------------------------------------------------------------

    async def _ensure(self) -> _Connection:
        """The connection to a living runner. Waits for the clean-up after a dead one. Called under the lock."""
        if self._closing:
            raise RunStopped("the agent runner was closed")
        current = self._connection
        if current is not None and current.task is not None:
            if not current.lost and current.process.poll() is None:
                return current
            await asyncio.wait([current.task])
            self._connection = None
        if self._losses_in_a_row >= self._max_losses:
            raise RunStopped(
                f"the process that owns the agents died {self._losses_in_a_row} times in a row; look for an "
                f"out-of-memory killer or a process limit{self._log_hint()}"
            )
        return await self._spawn()

    def _launch(self, control_fd: int) -> subprocess.Popen[bytes]:
        with ExitStack() as stack:
            log = stack.enter_context(self._log_path.open("ab")) if self._log_path else subprocess.DEVNULL
            return subprocess.Popen(
                runner_command(),
                stdin=control_fd,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd="/",
                env=_runner_environment(),
                start_new_session=True,
            )

    async def _spawn(self) -> _Connection:
        ours, theirs = socket.socketpair()
        try:
            process = self._launch(theirs.fileno())
        except OSError as error:
            ours.close()
            raise RunStopped(f"the process that owns the agents cannot be started: {error}") from error
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=_MAX_LINE)
        connection = _Connection(process=process, reader=reader, writer=writer)
        hello: Line = {
            "op": "hello",
            "run_id": self.run_id,
            "parent_pid": os.getpid(),
            "shell": self._shell,
            "grace_s": self.grace_s,
            "sweep_s": self._sweep_s,
        }
        writer.write(encode(hello))
        ready = asyncio.get_running_loop().create_future()
        connection.task = asyncio.create_task(self._serve(connection, ready), name="agent-runner")
        # Known before it is ready: a caller that is cancelled here leaves it to the next one.
        self._connection = connection
        done, _ = await asyncio.wait([ready], timeout=_READY_TIMEOUT_S)
        if not done or not ready.result():
            process.kill()
            await asyncio.wait([connection.task])
            raise RunStopped("the process that owns the agents did not start" + self._log_hint())
        return connection

    def _log_hint(self) -> str:
        return f"; see {self._log_path}" if self._log_path else ""

    async def _serve(self, connection: _Connection, ready: asyncio.Future[bool]) -> None:
        """Take the runner's reports until it ends, then settle what it left."""
        try:
            while line := await _read_line(connection.reader):
                message = decode(line)
                if message["event"] == "ready":
                    ready.set_result(True)
                elif message["event"] == "closing":
                    connection.lost = True
                else:
                    self._take(message)
        finally:
            connection.lost = True
            if not ready.done():
                ready.set_result(False)
            connection.writer.close()
            await self._settle(connection)

    async def _settle(self, connection: _Connection) -> None:
        clean = self._closing
        if not clean:
            self.num_losses += 1
            self._losses_in_a_row += 1
            logger.warning("the process that owns the agents died; %d agents are lost", self.num_running)
        for agent in self._agents.values():
            if not agent.exit.done():
                lost = AgentExit(runner_lost=True, started=agent.started, kill_reason=agent.kill_reason)
                agent.exit.set_result(lost)
        if not clean or self._agents:
            result = await asyncio.to_thread(_bury, connection.process, self.run_id)
            for agent in list(self._agents.values()):
                self._forget(agent, result)
        else:
            await asyncio.to_thread(connection.process.wait)

    def _take(self, message: Line) -> None:
        agent = self._agents.get(str(message["session"]))
        if agent is None:
            return
        event = message["event"]
        if event == "started":
            agent.started = True
        elif event == "start_failed":
            agent.exit.set_result(AgentExit(started=False, error=str(message["error"])))
        elif event == "exit":
            code, signum, killed = message["code"], message["signal"], bool(message["killed"])
            self._losses_in_a_row = 0
            agent.exit.set_result(
                AgentExit(
                    exit_code=code if isinstance(code, int) else None,
                    signal=signum if isinstance(signum, int) else None,
                    killed=killed,
                    kill_reason=(agent.kill_reason or "the runner was told to stop") if killed else None,
                )
            )
        elif event == "gone":
            survivors = message["survivors"]
            self._forget(agent, survivors if isinstance(survivors, int) else 0)

    def _forget(self, agent: _Agent, survivors: int) -> None:
        if survivors:
            self._survivors[agent.session_id] = survivors
            logger.warning("%d processes of session %s could not be ended", survivors, agent.session_id)
        agent.gone.set_result(survivors)
        del self._agents[agent.session_id]

    # -- ending one agent -------------------------------------------------------------------------------------------

    def _request_kill(self, agent: _Agent, reason: str) -> None:
        connection = self._connection
        if agent.exit.done() or connection is None or connection.writer.is_closing():
            return
        agent.kill_reason = agent.kill_reason or reason
        connection.writer.write(encode({"op": "kill", "session": agent.session_id}))
        asyncio.get_running_loop().call_later(self.grace_s + _MARGIN_S, self._give_up_runner, agent, connection)

    def _give_up_runner(self, agent: _Agent, connection: _Connection) -> None:
        """A runner that did not end an agent long after it had to is stuck: treat it as lost."""
        if not agent.exit.done() and connection.process.poll() is None:
            logger.warning("the process that owns the agents does not answer; it is replaced")
            connection.process.kill()


def runner_command() -> list[str]:
    """The runner without site-packages and user settings: `silva` is found by the folder of the running package."""
    package_file = silva.__file__
    assert package_file is not None
    root = str(Path(package_file).resolve().parent.parent)
    code = f"import sys; sys.path.append({root!r}); from silva.processes.runner import main; sys.exit(main())"
    return [sys.executable, "-I", "-S", "-X", f"utf8={sys.flags.utf8_mode}", "-c", code]


def _runner_environment() -> dict[str, str]:
    """What finding programs and naming files needs. Never the run's marker: a sweep would end the runner."""
    return {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "LC_ALL", "LC_CTYPE")}


def _bury(process: subprocess.Popen[bytes], run_id: str) -> int:
    """Wait for a runner whose stream ended, then end what it left. Returns how many processes resist."""
    try:
        process.wait(timeout=_MARGIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return sweep_run(run_id).num_left


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """One whole line, or b"" when the runner is gone."""
    try:
        line = await reader.readline()
    except ConnectionError:
        return b""
    return line if line.endswith(b"\n") else b""


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
