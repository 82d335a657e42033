"""Sessions whose agents are processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Protocol

from silva.agent import (
    AgentExit,
    AgentOptions,
    AgentSpec,
    SessionFiles,
    agent_environment,
    create_session,
    log_tail,
    parse_agent_env,
    read_output_bytes,
)
from silva.export import Exporter, end_of, export_session
from silva.rollout.group_driver import RUNNER_LOST
from silva.turns import Session
from silva.types import AgentExecutionError, Clock, ExportRecord, SessionFailure

NO_OUTPUT_REASONS = frozenset(
    {
        *("session_files", "input_invalid", "agent_start_failed", "agent_exit", "agent_timeout", "agent_start_timeout"),
        RUNNER_LOST,
    }
)
"""Reasons of sessions whose agent did not end well: what it may have written says nothing."""


class AgentProcesses(Protocol):
    """Runs agent processes; `AgentRunner` is one."""

    async def run_agent(self, spec: AgentSpec) -> AgentExit:
        """Start an agent and wait for its end."""
        ...

    async def kill(self, session_id: str, reason: str) -> None:
        """End an agent early; its exit then carries the reason."""
        ...


@dataclass(eq=False)
class ProcessDriver:
    """One agent process a session, owned by the runner process.

    `seal` ends a session's model access; it is awaited after the process ended and before its conversation is read.
    """

    runner: AgentProcesses
    """Owns the agent processes."""
    options: AgentOptions
    """How agents run."""
    clock: Clock
    """Counts the limits."""
    seal: Callable[[str], Awaitable[object]]
    """Ends the model access of a session."""
    exporter: Exporter = field(default_factory=Exporter)
    """Reads what the agent wrote."""
    _: KW_ONLY
    run_dir: Path
    """The run's folder."""
    run_id: str
    """The marker that every process of the run carries."""
    base_url: str
    """Address of the model API for agents."""

    def __post_init__(self) -> None:
        """Raises ConfigError for an --agent-env that is none."""
        assert self.options.agent_command is not None
        self._command, self._cwd = self.options.agent_command, Path(self.options.agent_cwd).absolute()
        self._env, self._env_clear = parse_agent_env(self.options.agent_env), self.options.agent_env_clear
        self._timeout_s = self.options.agent_timeout
        self._start_timeout_s = self.options.agent_start_timeout or self.options.agent_timeout

    async def run(self, session: Session) -> list[ExportRecord]:
        assert session.input is not None
        files = await asyncio.to_thread(create_session, self.run_dir, session.session_id, session.input)
        spec = AgentSpec(
            session_id=session.session_id,
            command=self._command,
            cwd=self._cwd,
            env=agent_environment(
                files=files,
                base_url=self.base_url,
                session_id=session.session_id,
                group_id=session.runtime_group_id or session.group_id,
                mode=session.mode,
                run_id=self.run_id,
                agent_env=self._env,
                env_clear=self._env_clear,
            ),
            log_path=files.command_log,
        )
        ended = await self._run_limited(session, spec)
        await self.seal(session.session_id)
        self._check_exit(ended, session, files)
        try:
            session.output = await asyncio.to_thread(read_output_bytes, files.output_json) or None
            return await asyncio.to_thread(export_session, self.exporter, session)
        except SessionFailure as failure:
            # An agent that swallowed its own crash ends well: only its log shows what went wrong.
            raise AgentExecutionError(failure.reason, str(failure), log_tail=log_tail(files.command_log)) from failure

    async def _run_limited(self, session: Session, spec: AgentSpec) -> AgentExit:
        """The agent's end. What goes wrong comes out as it is, not inside a group: a RunStopped has to be seen."""
        try:
            async with asyncio.TaskGroup() as group:
                limits = group.create_task(self._enforce_limits(session))
                ended = await self.runner.run_agent(spec)
                limits.cancel()
        except ExceptionGroup as faults:
            raise faults.exceptions[0] from faults
        return ended

    async def _enforce_limits(self, session: Session) -> None:
        """Kill the agent when its active time, or its time to the first request, is over."""
        while True:
            elapsed_s = session.active.elapsed_s()
            left_s = self._timeout_s - elapsed_s
            reason = "agent_timeout"
            if not session.first_request.is_set() and self._start_timeout_s - elapsed_s < left_s:
                left_s, reason = self._start_timeout_s - elapsed_s, "agent_start_timeout"
            if left_s <= 0:
                await self.runner.kill(session.session_id, reason)
                return
            await self.clock.sleep(left_s)

    def _check_exit(self, ended: AgentExit, session: Session, files: SessionFiles) -> None:
        if ended.ok:
            return
        reason, message = "agent_exit", ended.describe()
        if ended.runner_lost:
            reason = RUNNER_LOST
        elif ended.error is not None:
            reason = "agent_start_failed"
        elif ended.kill_reason == "agent_timeout":
            reason = "agent_timeout"
            message = f"the agent was ended after {self._timeout_s:g} s of active time (--agent-timeout)"
        elif ended.kill_reason == "agent_start_timeout":
            reason = "agent_start_timeout"
            message = f"the agent sent no model request within {self._start_timeout_s:g} s (--agent-start-timeout)"
        elif session.requests and (session.requests[-1].http_status or 0) >= 400:
            message += f"; its last model request ended with {end_of(session.requests[-1])}"
        raise AgentExecutionError(reason, message, log_tail=log_tail(files.command_log))
