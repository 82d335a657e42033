"""Helpers of the agent tests: specs, and an independent look at /proc."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

from silva.agent.agent_runner import AgentSpec

PYTHON = "python3 -I -S -c"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def zombies_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if not alive(int(child))]


async def until(holds: Callable[[], object], what: str, limit_s: float = 30.0) -> None:
    """Poll until `holds()` is true; fail when it does not come."""
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, f"never came: {what}"
        await asyncio.sleep(0.02)


def agent(folder: Path, run_id: str, session_id: str, command: str, **env: str) -> AgentSpec:
    return AgentSpec(
        session_id=session_id,
        command=command,
        cwd=folder,
        env={
            "PATH": os.environ["PATH"],
            **env,
            "SILVA_RUN_ID": run_id,
            "RELAX_SESSION_ID": session_id,
        },
        log_path=folder / f"{session_id}.log",
    )
