"""Functions of the user in worker processes: real files, real processes."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from marked import marked
from silva_command import eventually

from silva.judge import user_function
from silva.judge.user_function import UserCodeError, UserFunctionPool
from silva.types.errors import ConfigError, RunStopped
from silva.types.sample_view import OptionsView

CODE = """
import asyncio, os, subprocess, sys, time

def echo(a, b):
    print("seen by echo", b)
    return {"a": a, "b": (b, True)}

def returns(what, _):
    import ctypes, enum
    class Role(str, enum.Enum):
        MAIN = "main"
    if what == "key":
        return {("a", 1): 1}
    return {
        "function": echo, "big": "x" * (17 << 20), "coroutine": later(0, 0), "array": __import__("numpy").ones(2),
        "float32": __import__("numpy").float32(0.5), "bool": __import__("numpy").bool_(True),
        "texts": {Role.MAIN: Role.MAIN},
    }[what] if what != "loop" else (lambda a: a.append(a) or a)([])

def ends(how, _):
    if how == "exit":
        sys.exit(4)
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "deep":
        return ends(how, _)
    if how == "gone":
        os._exit(3)
    if how == "shy":
        raise Shy
    if how == "group":
        raise ExceptionGroup("several", [ValueError("the inner one")])
    os.kill(os.getpid(), 11)

def pid(_, wait_s):
    time.sleep(wait_s)
    return os.getpid()

def leaves_things(_, __):
    import signal
    os.chdir("/")
    signal.setitimer(signal.ITIMER_REAL, 0.05)

def where(_, __):
    print("no end of line", end="")
    return os.getcwd()

def children(_, __):
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    return subprocess.Popen(["sleep", "600"]).pid

def hangs(_, __):
    children(0, 0)
    time.sleep(1e6)

async def later(value, wait_s):
    await asyncio.sleep(wait_s)
    return value

class Shy(Exception):
    def __str__(self):
        raise RuntimeError("not for you")

def forks(_, __):
    if not os.fork():
        return "child"
    time.sleep(0.2)
    return "parent"

def chatty(_, __):
    print("x" * 4000, "the end")

async def cancels_all(_, __):
    await asyncio.sleep(0.05)
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(1)

async def leaves(how, _):
    await asyncio.sleep(0.05)
    if how == "task":
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 1)
        asyncio.create_task(ends_soon())
        await asyncio.sleep(5)
    sys.exit(5)

async def ends_soon():
    sys.exit(6)

async def blocks(_, __):
    while True:
        pass

async def never(_, __):
    await asyncio.Event().wait()

async def dies(_, __):
    await asyncio.sleep(0.05)
    os._exit(7)

number = 5
def one(sample): return 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("import math\n\nmath.no_such_thing()\n")
    (tmp_path / "needs.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "wrong.py").write_text("def f(:\n")
    return tmp_path


@asynccontextmanager
async def pool_in(folder: Path, **more):
    async with UserFunctionPool(
        log_path=folder / "user_code.log", marker=f"run-{folder.name}-code", folder=folder, **more
    ) as pool:
        yield pool
    assert marked(f"run-{folder.name}-code") == [] and not Path(pool._link_folder.name).exists()


async def test_values_go_out_and_errors_come_back_with_the_users_own_lines(folder: Path):
    async with pool_in(folder) as pool:
        echo = await pool.check("rewards.echo", "--custom-rm-path", ("args", "sample"))
        assert await echo([1.5, None], "é") == {"a": [1.5, None], "b": ["é", True]}
        assert "seen by echo é" in (folder / "user_code.log").read_text()
        returns = await pool.check("rewards.returns", "--x", ("args", "sample"))
        assert [await returns(what, 0) for what in ("array", "float32", "bool")] == [[1.0, 1.0], 0.5, True]
        (text,) = (await returns("texts", 0)).items()
        assert text == ("main", "main") and {type(each) for each in text} == {str}  # no class of the user comes here
        for what, told in {
            "function": "returned a builtins.function",
            "big": "returned 17,825,8.. bytes; at most 16,777,216",
            "coroutine": "a coroutine that nothing awaited; declare the function with `async def`",
            "loop": "RecursionError",
            "key": "returned a dict with a tuple as a key",
            "typo": "KeyError: 'typo'",
        }.items():
            with pytest.raises(UserCodeError, match=told) as caught:
                await returns(what, 0)
            assert caught.value.reason == "raised"
            assert what != "typo" or "in returns" in str(caught.value)
        ends = await pool.check("rewards.ends", "--x", ("args", "sample"))
        for how, reason, told in (
            ("exit", "raised", "tried to end its process: SystemExit: 4"),
            ("interrupt", "raised", "tried to end its process: KeyboardInterrupt"),
            ("deep", "raised", "RecursionError"),
            ("group", "raised", "ValueError: the inner one"),
            ("shy", "raised", "Shy: <exception str\\(\\) failed>"),
            ("gone", "crashed", "exit status 3"),
            ("segfault", "crashed", "SIGSEGV"),
        ):
            with pytest.raises(UserCodeError, match=told) as caught:
                await ends(how, 0)
            assert caught.value.reason == reason
        assert await echo(1, 2) == {"a": 1, "b": [2, True]}


async def test_check_says_what_is_wrong_with_a_path(folder: Path):
    async with pool_in(folder) as pool:
        for path, told in {
            "rewards": "must be written as module.function",
            "rewards.py:echo": r"must be written as module.function .*; did you mean rewards\.echo\?",
            "wrong.f": r"importing wrong failed: File .*wrong.py\", line 1.*SyntaxError: [^\n]*$",
            "rewrads.echo": r"no module 'rewrads' \(looked in .* first.*did you mean 'rewards'\?",
            "rewards.ecko": r"rewards.py has no 'ecko'; did you mean rewards.echo\?",
            "rewards.number": "is a int, which is not callable",
            "rewards.one": r"called with \(args, sample\), but takes \(sample\): too many",
            "broken.f": "importing broken failed: AttributeError.*line 3.*math.no_such_thing",
            "needs.f": "importing needs failed: ModuleNotFoundError: No module named 'not_installed",
        }.items():
            with pytest.raises(ConfigError, match=f"(?s)^--custom-rm-path {path}: .*{told}"):
                await pool.check(path, "--custom-rm-path", ("args", "sample"))


async def test_an_optional_parameter_goes_to_a_function_that_needs_or_names_it(folder: Path):
    (folder / "optional.py").write_text(
        "def names(rows, group=None): return group\ndef needs(rows, view): return view\n"
        "def plain(rows): pass\ndef other(rows, scale=1.0): pass\ndef rest(*rows, **group): pass\n"
        "async def later(rows, group): return group\ndef three(rows, group, more): pass\n"
    )
    async with pool_in(folder) as pool:

        async def accepts(name: str) -> tuple[str, ...]:
            return (await pool.check(f"optional.{name}", "--x", ("rows",), optional=("group",))).accepts

        assert [await accepts(name) for name in ("names", "needs", "later")] == [("group",)] * 3
        assert [await accepts(name) for name in ("plain", "other", "rest")] == [()] * 3
        assert await (await pool.check("optional.names", "--x", ("rows",), ("group",)))(1, {"n": 2}) == {"n": 2}
        with pytest.raises(ConfigError, match=r"called with \(rows\), but takes \(rows, group, more\): missing"):
            await accepts("three")


async def test_workers_are_reused_bounded_and_start_clean(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    async with pool_in(folder, max_concurrency=2) as pool:
        pid = await pool.check("rewards.pid", "--x", ("args", "sample"))
        assert len(set(await asyncio.gather(*(pid(0, 0.05) for _ in range(6))))) == 2
        await (await pool.check("rewards.leaves_things", "--x", ("args", "sample")))(0, 0)
        assert await pid(0, 0.2) in pool.pids  # the timer that was left running did not end it
        assert await (await pool.check("rewards.where", "--x", ("args", "sample")))(0, 0) == str(folder)
        assert (folder / "user_code.log").read_text() == "no end of line"
        asleep = await pool.check("rewards.later", "--x", ("args", "sample"))
        assert await asyncio.gather(*(asleep(n, 0.01) for n in range(8))) == list(range(8))
        for worker in pool.pids:
            os.kill(worker, signal.SIGKILL)
        assert await asyncio.gather(pid(0, 0.05), pid(0, 0.05))  # a worker that died while idle fails no call


async def test_a_crash_in_a_shared_worker_fails_only_the_call_that_made_it(folder: Path):
    async with pool_in(folder) as pool:
        later = await pool.check("rewards.later", "--x", ("args", "sample"))
        dies = await pool.check("rewards.dies", "--x", ("args", "sample"))
        results = await asyncio.gather(dies(0, 0), *(later(n, 0.2) for n in range(3)), return_exceptions=True)
        assert results[1:] == [0, 1, 2]
        assert isinstance(results[0], UserCodeError) and results[0].reason == "crashed"


async def test_a_call_that_cancels_all_others_fails_alone(folder: Path):
    async with pool_in(folder) as pool:
        later = await pool.check("rewards.later", "--x", ("args", "sample"))
        guilty = await pool.check("rewards.cancels_all", "--x", ("args", "sample"))
        results = await asyncio.gather(guilty(0, 0), *(later(n, 0.1) for n in range(3)), return_exceptions=True)
        assert results[1:] == [0, 1, 2]
        assert isinstance(results[0], UserCodeError) and "CancelledError" in str(results[0])


async def test_of_a_call_that_forks_the_parent_answers(folder: Path):
    async with pool_in(folder) as pool:
        assert await (await pool.check("rewards.forks", "--x", ("args", "sample")))(0, 0) == "parent"


async def test_async_calls_that_end_their_process_fail_alone(folder: Path):
    async with pool_in(folder) as pool:
        later = await pool.check("rewards.later", "--x", ("args", "sample"))
        leaves = await pool.check("rewards.leaves", "--x", ("args", "sample"))
        calls = (leaves("itself", 0), leaves("task", 0), *(later(n, 0.1) for n in range(3)))
        itself, task, *others = await asyncio.gather(*calls, return_exceptions=True)
        assert others == [0, 1, 2]
        for error, status in ((itself, 5), (task, 6)):
            assert isinstance(error, UserCodeError) and f"tried to end its process: SystemExit: {status}" in str(error)


async def test_an_async_call_that_is_late_costs_the_others_nothing_but_time(folder: Path):
    """One that heeds its cancellation ends alone; one that blocks the loop costs the worker, and the rest run again."""
    async with pool_in(folder, timeout_s=0.5, cancel_grace_s=0.2) as pool:
        later, blocks = [await pool.check(f"rewards.{name}", "--x", ("args", "sample")) for name in ("later", "blocks")]
        for bad, same_worker in ((later(0, 60), True), (blocks(0, 0), False)):
            await later(0, 0)
            before = pool.pids
            error, *others = await asyncio.gather(bad, *(later(n, 0.1) for n in range(3)), return_exceptions=True)
            assert others == [0, 1, 2]
            assert isinstance(error, UserCodeError) and error.reason == "timeout"
            assert (before == pool.pids) == same_worker


async def test_a_caller_that_is_cancelled_ends_its_call(folder: Path):
    async with pool_in(folder, cancel_grace_s=0.1) as pool:
        pid, later, blocks = [
            await pool.check(f"rewards.{name}", "--x", ("args", "sample")) for name in ("pid", "later", "blocks")
        ]
        for call in (pid(0, 600), later(0, 600), blocks(0, 0)):
            running = asyncio.create_task(call)
            await asyncio.sleep(0.2)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        assert await later(1, 0) == 1 and await pid(0, 0) in pool.pids


async def test_callers_that_wait_when_the_pool_closes_are_told_that_the_run_ended(folder: Path):
    async with pool_in(folder, max_concurrency=1) as pool:
        hangs, never = [await pool.check(f"rewards.{name}", "--x", ("args", "sample")) for name in ("hangs", "never")]
        running = [asyncio.create_task(call) for call in (hangs(0, 0), hangs(0, 0), never(0, 0), never(0, 0))]
        await asyncio.sleep(0.3)
        await pool.close()
        ends = await asyncio.gather(*running, return_exceptions=True)
        assert [type(end) for end in ends] == [RunStopped] * 4


async def test_the_death_of_the_runner_of_the_workers_fails_no_later_call(folder: Path):
    async with pool_in(folder) as pool:
        pid = await pool.check("rewards.pid", "--x", ("args", "sample"))
        running = asyncio.create_task(pid(0, 600))
        await asyncio.sleep(0.3)
        runner = pool._runner.pid
        assert runner is not None
        os.kill(runner, signal.SIGKILL)
        with pytest.raises(UserCodeError, match="lost its process"):
            await running
        survivor = await pid(0, 0)
        assert marked(f"run-{folder.name}-code") == [survivor]


async def test_of_a_log_that_grows_the_end_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(user_function, "MAX_LOG_BYTES", 3000)
    monkeypatch.setattr(user_function, "_LOG_TAIL_BYTES", 1000)
    async with pool_in(folder) as pool:
        await (await pool.check("rewards.chatty", "--x", ("args", "sample")))(0, 0)
    text = (folder / "user_code.log").read_text()
    assert text.startswith("... (silva cut what was here: the log had 40") and text.endswith("x the end\n")
    assert len(text) < 1100


async def test_what_user_code_started_ends_with_its_worker_and_with_the_pool(folder: Path):
    async with pool_in(folder, timeout_s=0.3) as pool:
        children = await pool.check("rewards.children", "--x", ("args", "sample"))
        hangs = await pool.check("rewards.hangs", "--x", ("args", "sample"))
        child = await children(0, 0)
        await asyncio.to_thread(eventually, lambda: child in marked(f"run-{folder.name}-code"))
        worker = pool.pids
        with pytest.raises(UserCodeError, match=r"more than 0\.3 s"):
            await hangs(0, 0)
        await asyncio.to_thread(eventually, lambda: not {child, *worker} & set(marked(f"run-{folder.name}-code")))


TRAINER = """
import asyncio, sys
from pathlib import Path
from silva.judge.user_function import UserFunctionPool

async def main():
    pool = UserFunctionPool(log_path=Path("log"), marker=sys.argv[1])
    hangs = await pool.check("rewards.hangs", "--x", ("args", "sample"))
    never = await pool.check("rewards.never", "--x", ("args", "sample"))
    await asyncio.gather(hangs(0, 0), never(0, 0))

asyncio.run(main())
"""


def test_kill_9_of_the_trainer_leaves_no_worker_and_no_child_of_one(folder: Path):
    marker = f"run-{folder.name}-code"
    trainer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(TRAINER), marker], cwd=folder)
    try:
        eventually(lambda: len(marked(marker)) == 4)
    finally:
        trainer.kill()
        trainer.wait()
    eventually(lambda: not marked(marker))


def test_options_are_read_only_and_travel():
    import pickle

    options = pickle.loads(pickle.dumps(OptionsView({"lr": 0.1, "seed": 3})))
    assert (options.lr, options.seed) == (0.1, 3)
    with pytest.raises(AttributeError, match="no option sed; did you mean seed"):
        _ = options.sed
    with pytest.raises(AttributeError, match="cannot be set"):
        options.lr = 1
