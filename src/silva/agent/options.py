"""Options of agent processes."""

from __future__ import annotations

from dataclasses import dataclass

from silva.types import opt


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """How agent processes run."""

    use_agentic_rollout: bool = opt(
        "agent", False, "Run one agent process per session (the only kind of rollout that is built)."
    )
    agent_command: str | None = opt(
        "agent", None, "Command that runs one agent session, started by `bash -c`.", metavar="COMMAND"
    )
    agent_cwd: str = opt("agent", ".", "Working directory of the agent command.", metavar="FOLDER")
    agent_env: list[str] = opt(
        "agent", [], "Variables for the agent; names that start with RELAX_ are refused.", metavar="NAME=VALUE"
    )
    agent_env_clear: bool = opt(
        "agent", False, "Give the agent only PATH, HOME and the like, the contract's variables and --agent-env."
    )
    agent_timeout: float = opt(
        "agent", 1800.0, "Limit of a session's active time, in seconds.", metavar="SECONDS", above=0
    )
    agent_start_timeout: float | None = opt(
        "agent",
        None,
        "Limit until an agent's first model request, in seconds (default: --agent-timeout).",
        metavar="SECONDS",
        above=0,
    )
    agent_retries: int = opt("agent", 1, "New sessions that may replace a failed one in its slot.", low=0)
    agent_max_failures: int = opt(
        "agent", 32, "Failures in a row that stop the run; a step in which every session fails stops it too.", low=1
    )
