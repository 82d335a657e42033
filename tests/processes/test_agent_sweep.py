"""Finding and ending processes by their marker."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from agent_support import alive
from hypothesis import given, settings
from hypothesis import strategies as st
from marked import marked

from silva.processes import sweep
from silva.processes.sweep import ProcTable, owner_in, read_stat, send_signal, sweep_run


@pytest.fixture
def start():
    """Start a process that is ended with the test; returns it when `command` runs."""
    started = []

    def begin(command: list[str], **env: str) -> subprocess.Popen:
        process = subprocess.Popen(command, env={"PATH": os.environ["PATH"], **env}, stdout=subprocess.PIPE)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def run_id():
    return f"run-{uuid.uuid4().hex[:12]}"


def table_of(run_id: str) -> ProcTable:
    return ProcTable(run_id, spare=(os.getpid(),))


def test_sessions_and_runs_are_told_apart(start, run_id):
    ours = start(["sleep", "600"], SILVA_RUN_ID=run_id, RELAX_SESSION_ID="a")
    start(["sleep", "600"], SILVA_RUN_ID=run_id, RELAX_SESSION_ID="b")
    start(["sleep", "600"], SILVA_RUN_ID=run_id + "0", RELAX_SESSION_ID="a")
    start(["sleep", "600"], SILVA_RUN_ID_X=run_id, RELAX_SESSION_ID="a", X=f"SILVA_RUN_ID={run_id}")
    unnamed = start(["sleep", "600"], SILVA_RUN_ID=run_id)
    table = table_of(run_id)
    table.refresh()
    assert [proc.pid for proc in table.alive("a")] == [ours.pid]
    assert [proc.pid for proc in table.alive("")] == [unnamed.pid]
    assert sorted(table.owners()) == ["", "a", "b"]


def test_a_process_is_looked_at_once(start, run_id, monkeypatch):
    ours = start(["sleep", "600"], SILVA_RUN_ID=run_id, RELAX_SESSION_ID="a")
    stranger = start(["sleep", "600"])
    looked = []
    read_environ = sweep._read_environ
    monkeypatch.setattr(sweep, "_read_environ", lambda pid: looked.append(pid) or read_environ(pid))
    table = table_of(run_id)
    for _ in range(30):
        table.refresh()
    assert looked.count(stranger.pid) == 1
    assert looked.count(ours.pid) == 1


def test_a_process_seen_before_its_exec_is_found_afterwards(start, run_id):
    code = (
        "import os,sys; print('up', flush=True); sys.stdin.read(1);"
        f"os.execve('/bin/sleep', ['sleep', '600'], {{'SILVA_RUN_ID': '{run_id}', 'RELAX_SESSION_ID': 'a'}})"
    )
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code], env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        process.stdout.readline()
        table = table_of(run_id)
        table.refresh()
        assert table.owners() == []
        process.stdin.write(b"x")
        process.stdin.close()
        while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
            time.sleep(0.01)
        table.refresh()
        assert [proc.pid for proc in table.alive("a")] == [process.pid]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_pid_that_was_used_again_is_not_signalled(start, run_id):
    process = start(["sleep", "600"], SILVA_RUN_ID=run_id, RELAX_SESSION_ID="a")
    table = table_of(run_id)
    table.refresh()
    (proc,) = table.alive("a")
    proc.start += 1
    assert not send_signal(proc, signal.SIGKILL)
    assert process.poll() is None
    assert table.alive("a") == []
    proc.start -= 1
    assert send_signal(proc, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not send_signal(proc, signal.SIGKILL)


def test_zombies_do_not_count(start, run_id):
    process = start(["sleep", "600"], SILVA_RUN_ID=run_id, RELAX_SESSION_ID="a")
    table = table_of(run_id)
    table.refresh()
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert read_stat(process.pid).state == "Z"
    assert table.alive("a") == []


def test_a_command_name_cannot_forge_the_fields_behind_it(start, tmp_path):
    name = tmp_path / "x) Z 1 1 (y"
    name.symlink_to("/bin/sleep")
    process = start([str(name), "600"])
    while "y" not in Path(f"/proc/{process.pid}/comm").read_text():
        time.sleep(0.01)
    stat = read_stat(process.pid)
    assert (stat.state in "SR", stat.ppid) == (True, os.getpid())


def test_no_such_process_has_no_stat():
    process = subprocess.Popen(["true"])
    process.wait()
    assert read_stat(process.pid) is None


@settings(deadline=None)
@given(
    st.dictionaries(
        st.binary(min_size=1, max_size=12).filter(lambda b: b"\0" not in b and b"=" not in b),
        st.binary(max_size=40).filter(lambda b: b"\0" not in b),
        max_size=6,
    ),
    st.booleans(),
    st.sampled_from([None, "s1", ""]),
)
def test_owner_in_reads_any_environment_block(env, in_run, session):
    full = dict(env)
    if in_run:
        full[b"SILVA_RUN_ID"] = b"r1"
    if session is not None:
        full[b"RELAX_SESSION_ID"] = session.encode()
    block = b"".join(k + b"=" + v + b"\0" for k, v in full.items())
    assert owner_in(block, b"SILVA_RUN_ID=r1") == ((session or "") if in_run else None)


def test_sweep_run_ends_all_of_a_run_and_nothing_else(start, run_id):
    deaf = "trap '' TERM; echo up; while :; do sleep 0.02; done"
    ours = [start(["bash", "-c", deaf], SILVA_RUN_ID=run_id, RELAX_SESSION_ID=f"s{i}") for i in range(3)]
    other = start(["bash", "-c", deaf], SILVA_RUN_ID=run_id + "0", RELAX_SESSION_ID="s0")
    for process in [*ours, other]:
        process.stdout.readline()
    assert sweep_run(run_id, grace_s=0.2, pause_s=0.02) == 0
    assert marked(run_id) == []
    assert other.poll() is None


def test_sweep_run_spares_its_own_process_and_ancestors(run_id):
    """As after a resume from a shell that still carries the marker of the run."""
    code = f"from silva.processes.sweep import sweep_run; print(sweep_run({run_id!r}, grace_s=0, pause_s=0.01))"
    done = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "{code}"; echo shell lives'],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(sweep.__file__).parents[2]),
            "SILVA_RUN_ID": run_id,
            "RELAX_SESSION_ID": "s",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "0\nshell lives\n"


def test_after_the_death_of_trainer_and_runner_a_sweep_ends_what_is_left(run_id, tmp_path):
    code = f"""
import asyncio, os
from silva.agent.agent_runner import AgentRunner, AgentSpec
async def main():
    runner = AgentRunner(run_id={run_id!r})
    await runner.start()
    print(runner.pid, flush=True)
    env = {{"PATH": os.environ["PATH"], "SILVA_RUN_ID": {run_id!r}, "RELAX_SESSION_ID": "s"}}
    await runner.run_agent(AgentSpec(session_id="s", command="setsid sleep 600 & touch up; exec sleep 600",
                                     cwd={str(tmp_path)!r}, env=env, log_path={str(tmp_path / "log")!r}))
asyncio.run(main())
"""
    env = {**os.environ, "PYTHONPATH": str(Path(sweep.__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env) as trainer:
        runner_pid = int(trainer.stdout.readline())
        while not (tmp_path / "up").exists():
            time.sleep(0.02)
        trainer.send_signal(signal.SIGSTOP)
        os.kill(runner_pid, signal.SIGKILL)
        trainer.kill()
    while alive(runner_pid):
        time.sleep(0.02)
    assert len(marked(run_id)) == 2
    assert sweep_run(run_id, grace_s=0.5, pause_s=0.02) == 0
    assert marked(run_id) == []
