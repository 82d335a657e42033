"""Cases from the field about agent processes, with real processes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from marked import marked

from silva.agent import agent_runner
from silva.agent.agent_runner import AgentRunner, AgentSpec
from silva.agent.files import log_tail

TREE = """
python3 -I -S -c '
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)' &
setsid sleep 600 &
( (setsid sleep 600 &) & )
(trap '' TERM; exec sleep 600) &
while ! grep -q up "$LOG"; do sleep 0.02; done
touch ready
wait
"""
"""A child deaf to TERM, one in a Unix session of its own, a double fork, and one whose parent is the launcher."""
TREE_SIZE = 5

TRAINER = """
import asyncio, json, sys
from silva.agent.agent_runner import AgentRunner, AgentSpec

async def main():
    specs = json.load(sys.stdin)
    runner = AgentRunner(run_id=specs[0]["env"]["SILVA_RUN_ID"], grace_s=0.3, sweep_s=0.05)
    await runner.start()
    print(runner.pid, flush=True)
    await asyncio.gather(*(runner.run_agent(AgentSpec(**spec)) for spec in specs))

asyncio.run(main())
"""


def wait_until(holds, what: str, limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.02)


def stands(folder: Path, run_id: str, num_trees: int) -> bool:
    ready = all((folder / f"s{i}" / "ready").exists() for i in range(num_trees))
    return ready and len(marked(run_id)) == num_trees * TREE_SIZE


def spec_fields(folder: Path, run_id: str, session_id: str, command: str) -> dict:
    folder.mkdir(exist_ok=True)
    log = folder / "command.log"
    env = {
        "PATH": os.environ["PATH"],
        "LOG": str(log),
        "SILVA_RUN_ID": run_id,
        "RELAX_SESSION_ID": session_id,
    }
    return {"session_id": session_id, "command": command, "cwd": str(folder), "env": env, "log_path": str(log)}


@pytest.fixture
async def runner():
    runner = AgentRunner(run_id=f"run-{uuid.uuid4().hex[:12]}", grace_s=0.4, sweep_s=0.05)
    yield runner
    await runner.close()
    assert marked(runner.run_id) == []


@pytest.fixture
def start_trainer():
    """A process that runs agents and knows nothing of this one; ended with its agents whatever the test does."""
    started = []

    def start(specs: list[dict], prefix: str = "") -> tuple[subprocess.Popen, int]:
        trainer = subprocess.Popen(
            [sys.executable, "-c", prefix + TRAINER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(agent_runner.__file__).parents[2])},
            start_new_session=True,
        )
        started.append(trainer)
        trainer.stdin.write(json.dumps(specs).encode())
        trainer.stdin.close()
        return trainer, int(trainer.stdout.readline())

    yield start
    for trainer in started:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()


async def test_proc_01_a_grandchild_that_holds_stdout_does_not_hold_the_session(runner, tmp_path):
    command = "(echo from the grandchild; exec sleep 600) & sleep 0.2; echo '{\"reward\": 1}' > output.json; echo done"
    end = await runner.run_agent(AgentSpec(**spec_fields(tmp_path, runner.run_id, "s", command)))
    assert end.ok
    # The end was reported although the grandchild lives on, in its grace.
    assert log_tail(tmp_path / "command.log") == "from the grandchild\ndone\n"
    assert await runner.session_gone("s")
    assert marked(runner.run_id) == []


async def test_proc_01_a_grandchild_deaf_to_term_is_killed_after_the_session(runner, tmp_path):
    command = "(trap '' TERM; touch up; while :; do sleep 0.02; done) & while ! [ -e up ]; do sleep 0.02; done; exit 0"
    end = await runner.run_agent(AgentSpec(**spec_fields(tmp_path, runner.run_id, "s", command)))
    assert end.ok
    assert marked(runner.run_id) != []
    assert await runner.session_gone("s")
    assert marked(runner.run_id) == []


@pytest.mark.slow
@pytest.mark.parametrize("way", ["timeout", "cancel"])
async def test_proc_03_a_timeout_and_a_cancel_kill_the_whole_tree(runner, tmp_path, way):
    specs = [AgentSpec(**spec_fields(tmp_path / f"s{i}", runner.run_id, f"s{i}", TREE)) for i in range(3)]
    running = [asyncio.create_task(runner.run_agent(spec)) for spec in specs]
    await asyncio.to_thread(wait_until, lambda: stands(tmp_path, runner.run_id, 3), "all trees stand")
    if way == "timeout":
        for i in range(3):
            await runner.kill(f"s{i}", "timeout")
        ends = await asyncio.gather(*running)
        assert [(end.killed, end.kill_reason) for end in ends] == [(True, "timeout")] * 3
    else:
        for task in running:
            task.cancel()
        assert all(
            isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*running, return_exceptions=True)
        )
    assert all(await asyncio.gather(*(runner.session_gone(f"s{i}") for i in range(3))))
    assert marked(runner.run_id) == []
    children = Path(f"/proc/{runner.pid}/task/{runner.pid}/children").read_text().split()
    assert children == [], "the runner keeps no zombie"


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_proc_03_the_death_of_the_trainer_ends_every_tree_and_the_runner(start_trainer, tmp_path, signum):
    run_id = f"run-{uuid.uuid4().hex[:12]}"
    specs = [spec_fields(tmp_path / f"s{i}", run_id, f"s{i}", TREE) for i in range(3)]
    trainer, runner_pid = start_trainer(specs)
    wait_until(lambda: stands(tmp_path, run_id, 3), "all trees stand")
    trainer.send_signal(signum)
    trainer.wait()
    wait_until(lambda: not marked(run_id), "no process of the run is left")
    wait_until(lambda: not Path(f"/proc/{runner_pid}").exists(), "the runner is gone too")


@pytest.mark.slow
def test_proc_03_ctrl_c_reaches_the_trainer_alone_and_ends_every_tree(start_trainer, tmp_path):
    run_id = f"run-{uuid.uuid4().hex[:12]}"
    trainer, runner_pid = start_trainer([spec_fields(tmp_path, run_id, "s", TREE)])
    wait_until((tmp_path / "ready").exists, "the tree stands")
    assert os.getsid(runner_pid) != os.getsid(trainer.pid)
    os.killpg(trainer.pid, signal.SIGINT)
    assert trainer.wait(30) != 0
    wait_until(lambda: not marked(run_id), "no process of the run is left")


@pytest.mark.slow
def test_proc_03_a_fork_of_the_trainer_that_lives_on_keeps_no_agent_alive(start_trainer, tmp_path):
    """A worker forked without exec holds the trainer's end of the stream open: its end alone would not be noticed."""
    run_id = f"run-{uuid.uuid4().hex[:12]}"
    fork = (
        "import os, time, threading\n"
        "def later():\n"
        f"    while not os.path.exists({str(tmp_path / 'ready')!r}): time.sleep(0.02)\n"
        "    if os.fork() == 0:\n"
        f"        open({str(tmp_path / 'forked')!r}, 'w').close()\n"
        f"        while not os.path.exists({str(tmp_path / 'over')!r}): time.sleep(0.02)\n"
        "        os._exit(0)\n"
        "threading.Thread(target=later, daemon=True).start()\n"
    )
    trainer, _ = start_trainer([spec_fields(tmp_path, run_id, "s", TREE)], prefix=fork)
    wait_until((tmp_path / "forked").exists, "the worker was forked")
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not marked(run_id), "no process of the run is left")
    (tmp_path / "over").touch()
