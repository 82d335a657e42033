"""The trainer's side of the runner: start a process, wait for its end, end it, wait until nothing of it is left.

The agents of a run have one runner, the workers of its user functions another one.

    trainer ── AgentRunner ──(stream of messages)── runner ── bash -c COMMAND ── what the agent starts

If the trainer dies, the stream ends and the runner ends everything. If the runner dies, every waiting process ends as
lost, this side ends everything that carries the run's marker, and the next start gets a new runner. Real processes keep
real time: the bounds here are wall seconds, not the injected clock's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from silva.processes import Message, child_command, pack, read_message, sweep_run
from silva.types import RunStopped

logger = logging.getLogger("silva.agent")

_READY_TIMEOUT_S = 30.0
_MARGIN_S = 30.0
"""Seconds after the grace at which a runner that does not answer counts as stuck; it gives up on survivors after 10."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSpec:
    """What to start.

    Example: `program=("bash", "-c")` and `command="python agent.py"` run `bash -c "python agent.py"`.
    """

    session_id: str
    """Name of the process; unique among those that run."""
    command: str
    """Last argument of the program: for an agent, the text of --agent-command."""
    cwd: Path | str
    """Working directory."""
    env: Mapping[str, str]
    """The whole environment. The run's marker in it lets a sweep find what the process leaves behind."""
    log_path: Path | str
    """File to which output and errors are appended."""
    program: tuple[str, ...] = ("bash", "-c")
    """The program and its arguments before `command`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentExit:
    """How a launcher ended. Exactly one of these is set: `exit_code`, `signal`, `error`, `runner_lost`."""

    exit_code: int | None = None
    """Exit status; None if it did not exit by itself."""
    signal: int | None = None
    """Number of the signal that ended it; None if none did."""
    killed: bool = False
    """Its end was asked for before it came."""
    kill_reason: str | None = None
    """Who asked for the end, for example `agent_timeout`; None if nobody did."""
    started: bool = True
    """The process existed."""
    runner_lost: bool = False
    """The runner died, and the process was ended with it."""
    error: str | None = None
    """Why it could not be started; None if it was."""

    @property
    def ok(self) -> bool:
        """Whether the agent ended by itself with exit status 0."""
        return self.exit_code == 0 and not self.killed

    @property
    def status(self) -> str:
        """The name of the signal, or the exit status, in words."""
        if self.signal is None:
            return f"exit status {self.exit_code}"
        return signal.Signals(self.signal).name if self.signal in set(signal.Signals) else f"signal {self.signal}"

    def describe(self) -> str:
        """The end in words, for an error text."""
        if self.error is not None:
            return self.error
        if self.runner_lost:
            return "the process that owns the agents died, and the agent was ended with it"
        how = f"the agent {'was ended by' if self.signal is not None else 'ended with'} {self.status}"
        return f"{how} ({self.kill_reason})" if self.killed and self.kill_reason else how


@dataclass(eq=False, slots=True)
class _Agent:
    """One started process: futures for its end."""

    session_id: str
    exit: asyncio.Future[AgentExit] = field(default_factory=asyncio.Future[AgentExit])
    gone: asyncio.Future[int] = field(default_factory=asyncio.Future[int])
    kill_reason: str | None = None
    started: bool = False


@dataclass(eq=False, slots=True)
class _Life:
    """One runner process, from its start to its end."""

    process: subprocess.Popen[bytes]
    writer: asyncio.StreamWriter | None = None
    """None until the stream is open."""
    ready: asyncio.Future[bool] = field(default_factory=asyncio.Future[bool])
    """True when it takes starts, False if it ended before that."""
    lost: bool = False
    """It takes no more starts."""
    task: asyncio.Task[None] | None = None

    def send(self, *message: object) -> None:
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(pack(*message))


@dataclass(kw_only=True, eq=False)
class AgentRunner:
    """Owns a runner process. All methods belong to one event loop. At most one per `run_id` at a time."""

    run_id: str
    """The marker that everything of this run carries."""
    grace_s: float = 5.0
    """Seconds between TERM and KILL."""
    sweep_s: float = 0.25
    """Least seconds between sweeps."""
    max_losses: int = 5
    """Runner deaths in a row, without the end of an agent between them, after which a start raises RunStopped."""
    log_path: Path | None = None
    """Where the runner writes a traceback of its own."""
    owns: str = "the agents"
    """What it runs, for messages."""

    def __post_init__(self) -> None:
        self.num_losses = 0
        self._losses_in_a_row = 0
        self._name = f"the process that owns {self.owns}"
        self._lock = asyncio.Lock()
        self._life: _Life | None = None
        self._agents: dict[str, _Agent] = {}
        self._closing = False

    @property
    def pid(self) -> int | None:
        """The runner's process id, None while there is none."""
        return self._life.process.pid if self._life is not None else None

    @property
    def num_running(self) -> int:
        """Number of agents whose launcher has not ended."""
        return sum(not agent.exit.done() for agent in self._agents.values())

    async def start(self) -> None:
        """Start the runner process. Raises RunStopped when that fails."""
        async with self._lock:
            await self._ensure()

    async def run_agent(self, spec: AgentSpec) -> AgentExit:
        """Start an agent and wait until its launcher ends. Cancelling this call ends the agent.

        Raises RunStopped if the runner died `max_losses` times in a row, ValueError for a session that already runs.
        """
        async with self._lock:
            life = await self._ensure()
            if spec.session_id in self._agents:
                raise ValueError(f"session {spec.session_id} has an agent already")
            agent = _Agent(spec.session_id)
            self._agents[spec.session_id] = agent
            argv = [*spec.program, spec.command]
            life.send("start", spec.session_id, argv, str(spec.cwd), dict(spec.env), str(spec.log_path))
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
        """Wait until no process of an ended session is left. False if one could not be ended, or not in bounded time.

        True at once for a session that is not known (any more).
        """
        agent = self._agents.get(session_id)
        if agent is None:
            return True
        await asyncio.wait([agent.exit])
        done, _ = await asyncio.wait([agent.gone], timeout=self.grace_s + _MARGIN_S)
        return bool(done) and agent.gone.result() == 0

    async def close(self) -> None:
        """End all agents, then the runner, and wait for both. Bounded by the grace and some seconds."""
        self._closing = True
        async with self._lock:
            life = self._life
            if life is None or life.task is None:
                return
            for agent in self._agents.values():
                agent.kill_reason = agent.kill_reason or "the run ended"
            await asyncio.wait([life.ready, life.task], return_when=asyncio.FIRST_COMPLETED)
            if life.writer is not None and not life.writer.is_closing():
                life.writer.write_eof()
            done, _ = await asyncio.wait([life.task], timeout=self.grace_s + _MARGIN_S)
            if not done:
                life.process.kill()
            await life.task
            self._life = None

    # -- one life of the runner -------------------------------------------------------------------------------------

    async def _ensure(self) -> _Life:
        """Return a runner that lives, after the clean-up of a dead one. Called under the lock: there is one runner."""
        if self._closing:
            raise RunStopped("the agent runner was closed")
        life = self._life
        if life is not None and (life.lost or life.process.poll() is not None):
            assert life.task is not None
            await asyncio.wait([life.task])
            life = self._life = None
        if life is None:
            if self._losses_in_a_row >= self.max_losses:
                raise RunStopped(
                    f"{self._name} died {self._losses_in_a_row} times in a row; look for an out-of-memory killer or a "
                    f"process limit{self._log_hint()}"
                )
            life = self._life = self._launch()
        # a caller that is cancelled here leaves the starting runner to the next caller
        if not await asyncio.shield(life.ready):
            raise RunStopped(f"{self._name} did not start{self._log_hint()}")
        return life

    def _launch(self) -> _Life:
        """Start a runner. There is no await between the process and its owner: a cancelled caller leaks no process."""
        ours, theirs = socket.socketpair()
        try:
            with ExitStack() as stack:
                log = stack.enter_context(self.log_path.open("ab")) if self.log_path else subprocess.DEVNULL
                process = subprocess.Popen(
                    child_command("runner", flags=("-I", "-S")),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    cwd="/",
                    env=_runner_environment(),
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise RunStopped(f"{self._name} cannot be started: {error}") from error
        finally:
            theirs.close()
        life = _Life(process)
        life.task = asyncio.create_task(self._serve(life, ours), name="agent-runner")
        return life

    def _log_hint(self) -> str:
        return f"; see {self.log_path}" if self.log_path else ""

    async def _serve(self, life: _Life, ours: socket.socket) -> None:
        """Read the runner's reports until it ends, then end what it left."""
        reader, life.writer = await asyncio.open_connection(sock=ours)
        life.send("hello", self.run_id, os.getpid(), float(self.grace_s), float(self.sweep_s))
        too_late = asyncio.get_running_loop().call_later(_READY_TIMEOUT_S, life.process.kill)
        try:
            while (message := await read_message(reader)) is not None:
                too_late.cancel()
                if message[0] == "ready":
                    life.ready.set_result(True)
                elif message[0] == "closing":
                    life.lost = True
                else:
                    self._take(message)
        finally:
            life.lost = True
            if not life.ready.done():
                life.ready.set_result(False)
            too_late.cancel()
            life.writer.close()
            await self._settle(life)

    async def _settle(self, life: _Life) -> None:
        clean = self._closing
        if not clean:
            self.num_losses += 1
            self._losses_in_a_row += 1
            logger.warning("%s died; %d of its processes are lost", self._name, self.num_running)
        for agent in self._agents.values():
            if not agent.exit.done():
                lost = AgentExit(runner_lost=True, started=agent.started, kill_reason=agent.kill_reason)
                agent.exit.set_result(lost)
        if not clean or self._agents:
            result = await asyncio.to_thread(_bury, life.process, self.run_id)
            for agent in list(self._agents.values()):
                self._forget(agent, result)
        else:
            await asyncio.to_thread(life.process.wait)

    def _take(self, message: Message) -> None:
        agent = self._agents.get(str(message[1]))
        if agent is None:
            return
        match message:
            case ("started", *_):
                agent.started = True
            case ("start_failed", _, str(error)):
                agent.exit.set_result(AgentExit(started=False, error=error))
            case ("exit", _, int() | None as code, int() | None as signum, bool(killed)):
                self._losses_in_a_row = 0
                reason = (agent.kill_reason or "the runner was told to stop") if killed else None
                agent.exit.set_result(AgentExit(exit_code=code, signal=signum, killed=killed, kill_reason=reason))
            case ("gone", _, int(survivors)):
                self._forget(agent, survivors)
            case _:
                raise AssertionError(f"unknown message {message!r}")

    def _forget(self, agent: _Agent, survivors: int) -> None:
        if survivors:
            logger.warning("%d processes of session %s could not be ended", survivors, agent.session_id)
        agent.gone.set_result(survivors)
        del self._agents[agent.session_id]

    # -- ending one agent -------------------------------------------------------------------------------------------

    def _request_kill(self, agent: _Agent, reason: str) -> None:
        life = self._life
        if agent.exit.done() or life is None:
            return
        agent.kill_reason = agent.kill_reason or reason
        life.send("kill", agent.session_id)
        asyncio.get_running_loop().call_later(self.grace_s + _MARGIN_S, self._give_up_runner, agent, life)

    def _give_up_runner(self, agent: _Agent, life: _Life) -> None:
        """Kill a runner that did not end an agent long after it had to: it is stuck, and counts as lost."""
        if not agent.exit.done() and life.process.poll() is None:
            logger.warning("%s does not answer; it is replaced", self._name)
            life.process.kill()


def _runner_environment() -> dict[str, str]:
    """Return what finding programs and naming files needs. Never the run's marker: a sweep would end the runner."""
    return {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "LC_ALL", "LC_CTYPE")}


def _bury(process: subprocess.Popen[bytes], run_id: str) -> int:
    """Wait for a runner whose stream ended, then end what it left. Returns how many processes could not be ended."""
    try:
        process.wait(timeout=_MARGIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return sweep_run(run_id)
