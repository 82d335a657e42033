"""Options of agent processes."""

from __future__ import annotations

from dataclasses import dataclass

from silva.types import opt


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """How agent processes run."""

    use_agentic_rollout: bool = opt("agent", False)
    """Run one agent process per session (the only kind of rollout that is built)."""
    agent_command: str | None = opt("agent", None, metavar="COMMAND")
    """Command that runs one agent session, started by `bash -c`."""
    agent_cwd: str = opt("agent", ".", metavar="FOLDER")
    """Working directory of the agent command."""
    agent_env: list[str] = opt("agent", [], metavar="NAME=VALUE")
    """Variables for the agent; names that start with RELAX_ are refused."""
    agent_env_clear: bool = opt("agent", False)
    """Give the agent only PATH, HOME and the like, the contract's variables and --agent-env."""
    agent_timeout: float = opt("agent", 1800.0, metavar="SECONDS", above=0)
    """Limit of a session's active time, in seconds."""
    agent_start_timeout: float | None = opt("agent", None, metavar="SECONDS", above=0)
    """Limit until an agent's first model request, in seconds (default: --agent-timeout)."""
    agent_retries: int = opt("agent", 1, low=0)
    """New sessions that may replace a failed one in its slot."""
    agent_max_failures: int = opt("agent", 32, low=1)
    """Failures in a row that stop the run; a step in which every session fails stops it too."""
