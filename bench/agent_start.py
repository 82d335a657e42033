"""CPU that one agent start costs, agent and runner apart.

    python bench/agent_start.py [--agents 300] [--at-once 8] [--bystanders 0]

For each command: CPU seconds of the agents themselves, of the runner for them, and of this process (the trainer's
side), each in milliseconds an agent; then the runner's CPU time at rest and its memory. `--bystanders N` first starts N
idle processes that the sweeps have to list. Linux only (reads /proc).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from silva.agent.agent_runner import AgentRunner, AgentSpec

COMMANDS = ["true", "python3 -I -S -c pass"]
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_of(pid: int) -> tuple[float, float]:
    """(own, reaped children's) CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S, (int(fields[13]) + int(fields[14])) * TICK_S


def memory_kb(pid: int) -> int:
    """Resident private memory."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


async def measure(runner: AgentRunner, folder: Path, command: str, num_agents: int, at_once: int) -> str:
    """Run the command so many times and say what each cost."""
    assert runner.pid is not None
    slots = asyncio.Semaphore(at_once)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kind = COMMANDS.index(command)

    async def one(i: int) -> None:
        name = f"k{kind}-{i}"
        env = {"PATH": path, "SILVA_RUN_ID": runner.run_id, "RELAX_SESSION_ID": name}
        spec = AgentSpec(session_id=name, command=command, cwd=folder, env=env, log_path=folder / f"{name}.log")
        async with slots:
            end = await runner.run_agent(spec)
        assert end.ok, end.describe()
        assert await runner.session_gone(name)

    own, children = cpu_of(runner.pid)
    here, began = time.process_time(), time.monotonic()
    await asyncio.gather(*(one(i) for i in range(num_agents)))
    wall_s = time.monotonic() - began
    own_after, children_after = cpu_of(runner.pid)
    shares = (children_after - children, own_after - own, time.process_time() - here)
    agent_ms, runner_ms, here_ms = (1000 * share / num_agents for share in shares)
    return (
        f"{command!r}: agent {agent_ms:.2f} ms, runner {runner_ms:.2f} ms, trainer {here_ms:.2f} ms CPU an agent; "
        f"{num_agents / wall_s:.0f} agents/s over {num_agents} agents, {at_once} at once"
    )


async def measure_all(num_agents: int, at_once: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runner = AgentRunner(run_id=f"bench-{os.getpid()}")
        await runner.start()
        assert runner.pid is not None
        print(f"runner: {1000 * cpu_of(runner.pid)[0]:.0f} ms CPU to start, {memory_kb(runner.pid)} kB private memory")
        for command in COMMANDS:
            print(await measure(runner, Path(folder), command, num_agents, at_once))
        print(f"runner: {memory_kb(runner.pid)} kB private memory after all")
        await runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--bystanders", type=int, default=0)
    args = parser.parse_args()
    crowd = [subprocess.Popen(["sleep", "1000"]) for _ in range(args.bystanders)]
    try:
        asyncio.run(measure_all(args.agents, args.at_once))
    finally:
        for process in crowd:
            process.kill()
        for process in crowd:
            process.wait()


if __name__ == "__main__":
    main()
