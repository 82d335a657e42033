"""Real agents through a real runner."""

import asyncio
import os
import signal
import subprocess
from dataclasses import replace

import pytest
from agent_support import PYTHON, agent, alive, until, zombies_of
from marked import marked

from silva.agent import agent_runner
from silva.agent.agent_runner import AgentRunner
from silva.agent.files import log_tail
from silva.processes.frames import child_command
from silva.types.errors import RunStopped


@pytest.mark.parametrize(("command", "code"), [("true", 0), ("exit 3", 3), ("no-such-program-here", 127)])
async def test_exit_status_is_reported(runner, tmp_path, command, code):
    end = await runner.run_agent(agent(tmp_path, runner.run_id, "s", command))
    assert (end.exit_code, end.signal, end.killed, end.started, end.ok) == (code, None, False, True, code == 0)
    assert await runner.session_gone("s")


async def test_a_signal_is_reported_as_one(runner, tmp_path):
    end = await runner.run_agent(agent(tmp_path, runner.run_id, "s", "kill -SEGV $$"))
    assert (end.exit_code, end.signal) == (None, signal.SIGSEGV)
    assert "SIGSEGV" in end.describe()


async def test_output_and_errors_go_to_the_log_in_order(runner, tmp_path):
    await runner.run_agent(agent(tmp_path, runner.run_id, "s", "echo out; echo err >&2; echo again"))
    assert (tmp_path / "s.log").read_text() == "out\nerr\nagain\n"


async def test_twenty_megabytes_of_log_block_nobody_and_the_tail_is_the_end(runner, tmp_path):
    command = f"{PYTHON} \"print(('x' * 99 + chr(10)) * 200_000, end='last line')\""
    end = await runner.run_agent(agent(tmp_path, runner.run_id, "s", command))
    assert end.ok
    assert (tmp_path / "s.log").stat().st_size == 20_000_009
    tail = log_tail(tmp_path / "s.log")
    assert len(tail) == 4096
    assert tail.endswith("x\nlast line")


async def test_an_agent_starts_clean_whatever_the_trainer_holds(runner, tmp_path):
    """Own Unix session, input empty, no descriptor beyond the three, no signal ignored or blocked."""
    script = tmp_path / "look.py"
    script.write_text(
        "import os,sys\n"
        "fds={f: os.readlink(f'/proc/self/fd/{f}') for f in os.listdir('/proc/self/fd') if f in '012'}\n"
        "extra=[f for f in os.listdir('/proc/self/fd') if int(f) > 2 and os.path.exists(f'/proc/self/fd/{f}')]\n"
        "print(os.getsid(0) == os.getpid() == os.getpgid(0), fds['0'], len(sys.stdin.read()), extra, os.getcwd())\n"
        "print([l.split()[1] for l in open('/proc/%d/status' % os.getpid()) if l.startswith('SigBlk')])\n"
    )
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        await runner.start()
        end = await runner.run_agent(agent(tmp_path, runner.run_id, "s", f"exec python3 -I -S {script}"))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert end.ok
    assert (tmp_path / "s.log").read_text() == f"True /dev/null 0 [] {tmp_path}\n['0000000000000000']\n"
    assert os.getsid(runner.pid) == runner.pid


async def test_the_agent_gets_exactly_the_given_environment(runner, tmp_path):
    spec = agent(tmp_path, runner.run_id, "s", "exec env -0", ODD="a=b \udcff\n", EMPTY="")
    await runner.run_agent(spec)
    entries = (tmp_path / "s.log").read_bytes().split(b"\0")
    got = dict(entry.partition(b"=")[::2] for entry in entries if entry)
    added_by_bash = {b"PWD", b"SHLVL", b"_", b"OLDPWD"}
    assert {k: v for k, v in got.items() if k not in added_by_bash} == {
        os.fsencode(k): os.fsencode(v) for k, v in spec.env.items()
    }


async def test_an_agent_that_closes_everything_still_ends(runner, tmp_path):
    command = f'{PYTHON} "import os; os.closerange(0, 4096); os._exit(5)"'
    assert (await runner.run_agent(agent(tmp_path, runner.run_id, "s", command))).exit_code == 5


async def test_fifty_agents_at_once(runner, tmp_path):
    specs = [
        agent(tmp_path, runner.run_id, f"s{i}", f"echo $RELAX_SESSION_ID; (sleep 600 &); exit {i % 7}")
        for i in range(50)
    ]
    ends = await asyncio.gather(*(runner.run_agent(spec) for spec in specs))
    assert [end.exit_code for end in ends] == [i % 7 for i in range(50)]
    assert all(await asyncio.gather(*(runner.session_gone(spec.session_id) for spec in specs)))
    assert [(tmp_path / f"s{i}.log").read_text() for i in range(50)] == [f"s{i}\n" for i in range(50)]
    assert marked(runner.run_id) == []
    assert zombies_of(runner.pid) == []


async def test_one_session_ends_without_touching_its_neighbour(runner, tmp_path):
    other = asyncio.create_task(runner.run_agent(agent(tmp_path, runner.run_id, "other", "setsid -w sleep 600")))
    await until(lambda: len(marked(runner.run_id)) >= 2, "the neighbour runs")
    before = set(marked(runner.run_id))
    await runner.run_agent(agent(tmp_path, runner.run_id, "s", "(setsid sleep 600 &) ; (sleep 600 &)"))
    assert await runner.session_gone("s")
    assert set(marked(runner.run_id)) == before
    await runner.kill("other", "test over")
    assert (await other).killed


async def test_children_with_a_cleared_environment_are_reached_by_group_unix_session_and_parent(runner, tmp_path):
    pids = tmp_path / "pids"
    command = (
        f"env -i sleep 600 & echo $! >> {pids}; "
        f"(trap '' TERM; exec env -i sleep 600) & echo $! >> {pids}; "
        f"set -m; env -i sleep 600 & echo $! >> {pids}; exit 0"
    )
    await runner.run_agent(agent(tmp_path, runner.run_id, "s", command))
    assert await runner.session_gone("s")
    survivors = [pid for pid in map(int, pids.read_text().split()) if alive(pid)]
    assert len(pids.read_text().split()) == 3
    assert survivors == []


async def test_what_sheds_marker_unix_session_and_parent_ends_with_the_runner(tmp_path):
    """Beyond the reach of its session's end, as documented; as an adopted child it does not outlive the runner."""
    runner = AgentRunner(run_id="shed", grace_s=0.3, sweep_s=0.05)
    command = "(env -i setsid bash -c 'echo $$ > pid; sleep 600' &) ; while ! [ -s pid ]; do sleep 0.02; done"
    await runner.run_agent(agent(tmp_path, "shed", "s", command))
    await runner.session_gone("s")
    pid = int((tmp_path / "pid").read_text())
    assert alive(pid)
    await runner.close()
    assert not alive(pid)


async def test_orphans_of_a_running_agent_leave_no_zombies(runner, tmp_path):
    command = "for i in 1 2 3 4 5; do (true & true &) ; done; touch done; exec sleep 600"
    running = asyncio.create_task(runner.run_agent(agent(tmp_path, runner.run_id, "s", command)))
    await until((tmp_path / "done").exists, "the orphans were made")
    await until(lambda: zombies_of(runner.pid) == [], "adopted children are reaped")
    await runner.kill("s", "test over")
    await running


async def test_cancelling_the_call_ends_the_agent(runner, tmp_path):
    running = asyncio.create_task(runner.run_agent(agent(tmp_path, runner.run_id, "s", "sleep 600; true")))
    await until(lambda: len(marked(runner.run_id)) == 2, "the agent runs")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await runner.session_gone("s")
    assert marked(runner.run_id) == []


async def test_a_start_that_is_cancelled_leaves_a_runner_for_the_next(runner, tmp_path):
    first = asyncio.create_task(runner.run_agent(agent(tmp_path, runner.run_id, "a", "sleep 600")))
    while runner.pid is None:  # noqa: ASYNC110  cancelled at the first moment at which there is a process
        await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    pid = runner.pid
    assert (await runner.run_agent(agent(tmp_path, runner.run_id, "b", "true"))).ok
    assert runner.pid == pid


async def test_an_agent_gets_its_grace_after_term(runner, tmp_path):
    """The trap writes its file only because KILL does not come with TERM."""
    command = "trap 'echo bye > bye; exit 9' TERM; touch up; while :; do sleep 0.02; done"
    running = asyncio.create_task(runner.run_agent(agent(tmp_path, runner.run_id, "s", command)))
    await until((tmp_path / "up").exists, "the trap stands")
    await runner.kill("s", "timeout")
    end = await running
    assert (end.exit_code, end.killed, end.kill_reason, end.ok) == (9, True, "timeout", False)
    assert (tmp_path / "bye").read_text() == "bye\n"


async def test_an_agent_gets_one_term_not_one_per_sweep(runner, tmp_path):
    (tmp_path / "count.py").write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('term', flush=True))\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(9)\n"
    )
    command = "exec python3 -I -S count.py"
    running = asyncio.create_task(runner.run_agent(agent(tmp_path, runner.run_id, "s", command)))
    await until(lambda: log_tail(tmp_path / "s.log") == "up\n", "the handler is set")
    await runner.kill("s", "timeout")
    assert (await running).signal == signal.SIGKILL
    assert log_tail(tmp_path / "s.log") == "up\nterm\n"


async def test_starts_that_fail_say_why_and_harm_nobody_else(runner, tmp_path):
    good = agent(tmp_path, runner.run_id, "good", "true")
    no_cwd = agent_runner.AgentSpec(
        session_id="no-cwd", command="true", cwd=tmp_path / "missing", env={}, log_path=tmp_path / "x.log"
    )
    no_log = agent_runner.AgentSpec(
        session_id="no-log", command="true", cwd=tmp_path, env={}, log_path=tmp_path / "missing" / "x.log"
    )
    too_big = agent(tmp_path, runner.run_id, "big", "true", HUGE="x" * 200_000)
    nul = agent(tmp_path, runner.run_id, "nul", "echo a\0b")
    ends = [await runner.run_agent(spec) for spec in (no_cwd, no_log, too_big, nul)]
    assert [(end.started, end.exit_code) for end in ends] == [(False, None)] * 4
    texts = [end.describe() for end in ends]
    assert "missing' cannot be entered: No such file or directory; check --agent-cwd" in texts[0]
    assert "x.log' cannot be opened" in texts[1]
    assert "Argument list too long" in texts[2]
    assert "HUGE, 200000" in texts[2]
    assert "null" in texts[3]
    assert await runner.session_gone("no-cwd")
    assert (await runner.run_agent(good)).ok
    assert runner.num_losses == 0


async def test_a_missing_shell_is_named(tmp_path):
    runner = AgentRunner(run_id="no-shell")
    spec = replace(agent(tmp_path, "no-shell", "s", "true"), program=("no-such-shell", "-c"))
    end = await runner.run_agent(spec)
    await runner.close()
    assert "'no-such-shell': No such file or directory; install it" in end.describe()


@pytest.mark.slow
async def test_the_death_of_the_runner_ends_its_agents_and_the_next_session_gets_a_new_one(runner, tmp_path):
    command = "trap '' TERM; setsid sleep 600 & (sleep 600 &) ; while :; do sleep 1; done"
    running = [
        asyncio.create_task(runner.run_agent(agent(tmp_path, runner.run_id, f"s{i}", command))) for i in range(3)
    ]
    await until(lambda: len(marked(runner.run_id)) >= 9, "all agents run")
    os.kill(runner.pid, signal.SIGKILL)
    ends = await asyncio.gather(*running)
    assert [end.runner_lost for end in ends] == [True] * 3
    # the next agent waits until the sweep for those of the dead runner is over
    assert (await runner.run_agent(agent(tmp_path, runner.run_id, "at-once", "sleep 0.5"))).ok
    assert all(await asyncio.gather(*(runner.session_gone(f"s{i}") for i in range(3))))
    assert marked(runner.run_id) == []
    assert (await runner.run_agent(agent(tmp_path, runner.run_id, "next", "true"))).ok
    assert runner.num_losses == 1


async def test_a_runner_that_always_dies_stops_the_run(tmp_path):
    runner = AgentRunner(run_id="always-dies", grace_s=0.2, max_losses=2)
    for i in range(2):
        await runner.start()
        running = asyncio.create_task(runner.run_agent(agent(tmp_path, runner.run_id, f"s{i}", "sleep 600")))
        await until(lambda: marked(runner.run_id), "the agent runs")
        os.kill(runner.pid, signal.SIGKILL)
        assert (await running).runner_lost
    with pytest.raises(RunStopped, match="2 times in a row"):
        await runner.run_agent(agent(tmp_path, runner.run_id, "s2", "true"))
    await runner.close()


@pytest.mark.slow
async def test_term_makes_the_runner_end_its_agents_first(runner, tmp_path):
    running = asyncio.create_task(
        runner.run_agent(agent(tmp_path, runner.run_id, "s", "trap '' TERM; sleep 600 & wait"))
    )
    await until(lambda: len(marked(runner.run_id)) == 2, "the agent runs")
    os.kill(runner.pid, signal.SIGTERM)
    end = await running
    assert (end.signal, end.killed, end.kill_reason) == (signal.SIGKILL, True, "the runner was told to stop")
    assert await runner.session_gone("s")
    assert (await runner.run_agent(agent(tmp_path, runner.run_id, "next", "true"))).ok


@pytest.mark.slow
async def test_a_runner_that_does_not_answer_is_replaced(runner, tmp_path, monkeypatch):
    monkeypatch.setattr(agent_runner, "_MARGIN_S", 0.5)
    running = asyncio.create_task(runner.run_agent(agent(tmp_path, runner.run_id, "s", "sleep 600")))
    await until(lambda: marked(runner.run_id), "the agent runs")
    os.kill(runner.pid, signal.SIGSTOP)
    await runner.kill("s", "timeout")
    assert (await running).runner_lost
    assert (await runner.run_agent(agent(tmp_path, runner.run_id, "next", "true"))).ok


async def test_close_ends_all_and_says_so_to_who_waits(tmp_path):
    runner = AgentRunner(run_id="closing", grace_s=0.3, sweep_s=0.05)
    running = asyncio.create_task(runner.run_agent(agent(tmp_path, runner.run_id, "s", "trap '' TERM; sleep 600; :")))
    await until(lambda: len(marked(runner.run_id)) == 2, "the agent runs")
    pid = runner.pid
    await runner.close()
    assert (await running).kill_reason == "the run ended"
    assert marked("closing") == []
    assert not alive(pid)
    with pytest.raises(RunStopped, match="closed"):
        await runner.run_agent(agent(tmp_path, runner.run_id, "late", "true"))


async def test_a_session_runs_once_at_a_time(runner, tmp_path):
    running = asyncio.create_task(runner.run_agent(agent(tmp_path, runner.run_id, "s", "sleep 600")))
    await until(lambda: marked(runner.run_id), "the agent runs")
    with pytest.raises(ValueError, match="has an agent already"):
        await runner.run_agent(agent(tmp_path, runner.run_id, "s", "true"))
    await runner.kill("s", "test over")
    assert (await running).killed


async def test_without_proc_and_waitid_the_process_group_ends(tmp_path, monkeypatch):
    """As on systems other than Linux: no sweeps, the group alone is ended."""
    command = child_command("runner", flags=("-I", "-S"))
    command[-1] = command[-1].replace(
        "from silva", "import os; del os.waitid; from silva.processes import sweep; sweep.LINUX = False; from silva", 1
    )
    monkeypatch.setattr(agent_runner, "child_command", lambda *_, **__: command)
    runner = AgentRunner(run_id="group-only", grace_s=0.3, sweep_s=0.05)
    deaf = "(trap '' TERM; touch up; while :; do sleep 0.02; done) & while ! [ -e up ]; do sleep 0.02; done; "
    ends = [
        await runner.run_agent(agent(tmp_path, "group-only", "a", deaf + "exit 4")),
        await runner.run_agent(agent(tmp_path, "group-only", "b", "kill -9 $$")),
    ]
    assert [(end.exit_code, end.signal) for end in ends] == [(4, None), (None, 9)]
    assert await runner.session_gone("a")
    assert await runner.session_gone("b")
    await until(lambda: marked("group-only") == [], "the group is gone")
    await runner.close()


def test_the_runner_imports_nothing_heavy():
    command = child_command("runner", flags=("-I", "-S"))
    command[-1] = command[-1].replace("main(*())", "print(*sorted(sys.modules))")
    modules = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert "silva.processes.sweep" in modules
    heavy = {"torch", "transformers", "msgspec", "asyncio", "socket", "subprocess", "dataclasses", "typing", "ctypes"}
    assert modules & heavy == set()
    assert {name for name in modules if name.startswith("silva")} == {
        "silva",
        "silva.processes",
        "silva.processes.frames",
        "silva.processes.runner",
        "silva.processes.sweep",
    }
