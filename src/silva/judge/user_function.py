"""Functions of the user (rewards, credit) in processes of their own, so that none can stop, crash or delay the trainer.

Sync functions run one at a time in a worker, on its main thread; async functions share one worker, many at once. A call
that takes too long, crashes or cannot be handed over is a UserCodeError of that call alone. Real processes keep real
time: the bounds here are wall seconds, not the injected clock's.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import silva
from silva.agent.environment import trainer_environment
from silva.processes.sweep import RUN_MARKER
from silva.processes.user_worker import HEADER_BYTES, MAX_RESULT_BYTES
from silva.types.errors import ConfigError, RunStopped, SilvaError

log = logging.getLogger("silva.rollout")

Reason = Literal["raised", "timeout", "crashed"]
Mode = Literal["single", "shared"]
_Request = tuple[Literal["call", "check"], str, Any]
"""What is done, the function's path, and its pickled arguments or its parameters' names."""

WORKERS_PER_CORE = 4
_LOAD_LIMIT_S = 120.0
"""How long importing the user's module may take; the time of the call itself begins after it."""
_END_LIMIT_S = 15.0
"""How long the end of a killed process may take before it is given up."""
_DRAIN_S = 1.0
MAX_LOG_BYTES = 64 << 20
"""What user code may leave in its log; of more, the last `_LOG_TAIL_BYTES` are kept."""
_LOG_TAIL_BYTES = 1 << 20
_LOG_LOOK_S = 1.0


class UserCodeError(SilvaError):
    """A function of the user gave no value. The message holds the last lines of its own code, where there are any."""

    def __init__(self, reason: Reason, message: str):
        super().__init__(message)
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True)
class _Answer:
    """How a call ended: `value`, `error` and `cancelled` come from the worker, the others are seen from here.

    `late` and `unloaded`: its time, or that of its import, is over. `crashed`: its worker ended by itself. `disturbed`:
    its worker was killed for the fault of some call. `cancelled`: it was, from here or by user code of whatever call.
    """

    kind: Literal["value", "error", "cancelled", "late", "unloaded", "crashed", "disturbed"]
    value: Any = None


class _Call:
    """One call in a worker."""

    __slots__ = ("done", "number", "started")

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.started: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[_Answer] = loop.create_future()

    def begin(self) -> None:
        if not self.started.done():
            self.started.set_result(None)

    def end(self, answer: _Answer) -> None:
        if not self.done.done():
            self.done.set_result(answer)


@dataclass(kw_only=True, eq=False)
class _Worker:
    """One worker process and the calls that are in it. `condemned`: it was killed from here. `rubbish`: user code
    wrote into its link, or changed how it writes.
    """

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    calls: dict[int, _Call] = field(default_factory=dict[int, _Call])
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    condemned: bool = False
    reaped: bool = False
    rubbish: bool = False

    @property
    def usable(self) -> bool:
        return not self.condemned and not self.ended.is_set()

    def send(self, body: bytes) -> None:
        self.writer.write(len(body).to_bytes(HEADER_BYTES, "big") + body)

    def kill(self) -> None:
        """End the process, what it started, and all its calls, now."""
        self.condemned = True
        self.kill_group()
        for call in self.calls.values():
            call.end(_Answer("disturbed"))

    def kill_group(self) -> None:
        """The group's number is held by the process until it is reaped."""
        if not self.reaped:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass


class UserFunction:
    """A function of the user that passed its check. Calls may run at once; see UserFunctionPool for its bounds.

    `accepts` are the names of its optional parameters that it takes; a call gives their values after the required ones.
    """

    def __init__(self, pool: UserFunctionPool, path: str, *, is_async: bool, accepts: tuple[str, ...] = ()):
        self._pool = pool
        self.path = path
        self.is_async = is_async
        self.accepts = accepts

    async def __call__(self, *args: object) -> Any:
        """The value, made of numbers, texts, lists and dicts. Cancelling ends the call. Raises UserCodeError."""
        return await self._pool.run(self, args)


class UserFunctionPool:
    """Owns the worker processes. All methods belong to one event loop.

    Consumes calls; waits for a free slot (sync: `max_concurrency`, at most 4 a core; async: `max_concurrency` in one
    worker), then for the worker, at most `timeout_s` from where the function begins. A late sync call costs its worker,
    a late async one is cancelled; where it does not heed that within `cancel_grace_s`, or crashes, its worker is
    replaced and each call that was in it runs again, alone, so that only the guilty one fails. Workers start on demand
    and search `folder` first. All their processes carry `marker` as their run: a guard process ends them when the
    trainer dies.
    """

    def __init__(
        self,
        *,
        log_path: Path,
        marker: str,
        folder: Path | None = None,
        max_concurrency: int = 64,
        timeout_s: float = 30.0,
        cancel_grace_s: float = 1.0,
    ):
        self._log_path = log_path
        self._marker = marker
        self._folder = (folder or Path.cwd()).absolute()
        self._timeout_s = timeout_s
        self._cancel_grace_s = cancel_grace_s
        self._numbers = itertools.count(1)
        self._single_slots = asyncio.Semaphore(min(max_concurrency, WORKERS_PER_CORE * (os.cpu_count() or 1)))
        self._shared_slots = asyncio.Semaphore(max_concurrency)
        self._idle: list[_Worker] = []
        self._shared: _Worker | None = None
        self._start_lock = asyncio.Lock()
        self._watches: dict[asyncio.Task[None], _Worker] = {}
        self._guard: subprocess.Popen[bytes] | None = None
        self._closed = False

    async def __aenter__(self) -> UserFunctionPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def pids(self) -> list[int]:
        """Worker processes that live."""
        return [worker.process.pid for worker in self._watches.values() if worker.usable]

    async def check(self, path: str, flag: str, params: Sequence[str], optional: Sequence[str] = ()) -> UserFunction:
        """Import the function in a worker. Raises ConfigError that names `flag` where it cannot take `params`.

        `optional` are further parameters, given only to a function that needs them or names them so.
        """
        try:
            is_async, accepts = await self._alone(("check", path, (tuple(params), tuple(optional))))
        except UserCodeError as error:
            raise ConfigError(f"{flag} {path}: {str(error).removeprefix(f'{path} ')}") from error
        return UserFunction(self, path, is_async=is_async, accepts=tuple(accepts))

    async def run(self, function: UserFunction, args: tuple[object, ...]) -> Any:
        """One call; see UserFunction."""
        path = function.path
        try:
            packed = await asyncio.to_thread(pickle.dumps, args, 5)  # long samples take a moment: not on the loop
        except RecursionError as error:
            raise UserCodeError("raised", f"{path} cannot be given what is nested so deeply") from error
        request = ("call", path, packed)
        if not function.is_async:
            return await self._alone(request)
        async with self._shared_slots:
            answer = await self._run_shared(request)
            if answer.kind in ("crashed", "disturbed", "cancelled"):
                return await self._alone(request)
        return self._value(path, answer)

    async def close(self) -> None:
        """End every worker and all that user code started, and wait for it. Callers that still wait get RunStopped."""
        self._closed = True
        async with self._start_lock:
            watches = dict(self._watches)
        for worker in watches.values():
            worker.kill()
        if watches:
            await asyncio.wait(watches, timeout=_END_LIMIT_S)
        guard, self._guard = self._guard, None
        if guard is not None:
            await asyncio.to_thread(_dismiss, guard)

    # -- one call ---------------------------------------------------------------------------------------------------

    async def _alone(self, request: _Request) -> Any:
        """One call in a worker of its own. A worker that ended before the call began is no fault of it: once more."""
        async with self._single_slots:
            answer, began = await self._run_single(request)
            if answer.kind == "crashed" and not began:
                answer, _ = await self._run_single(request)
        return self._value(request[1], answer)

    async def _run_single(self, request: _Request) -> tuple[_Answer, bool]:
        worker = await self._take_idle()
        call = self._enter(worker, request)
        keep = False
        try:
            answer = await self._wait(call)
            keep = answer.kind in ("value", "error")
        finally:
            # Nothing else stops sync code. This is the way out of a cancelled caller too.
            worker.calls.pop(call.number, None)
            if not keep:
                worker.kill()
            elif worker.usable:
                self._idle.append(worker)
        return answer, call.started.done()

    async def _run_shared(self, request: _Request) -> _Answer:
        worker = await self._shared_worker()
        call = self._enter(worker, request)
        try:
            answer = await self._wait(call)
        except asyncio.CancelledError:
            self._cancel(worker, call)
            asyncio.get_running_loop().call_later(self._cancel_grace_s, self._kill_if_in, worker, call)
            raise
        if answer.kind not in ("late", "unloaded"):
            return answer
        self._cancel(worker, call)
        done, _ = await asyncio.wait([call.done], timeout=self._cancel_grace_s)
        if not done:
            self._kill_if_in(worker, call)
        ended = call.done.result()
        return ended if ended.kind in ("crashed", "disturbed") else answer

    async def _wait(self, call: _Call) -> _Answer:
        """Its answer, or that it is late. A check never begins a call: it is nothing but an import."""
        await asyncio.wait([call.started, call.done], timeout=_LOAD_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        if not call.done.done():
            if not call.started.done():
                return _Answer("unloaded")
            await asyncio.wait([call.done], timeout=self._timeout_s)
        return call.done.result() if call.done.done() else _Answer("late")

    def _value(self, path: str, answer: _Answer) -> Any:
        """The value of a call, or UserCodeError."""
        if answer.kind == "value":
            return answer.value
        log_hint = f"; what it printed is in {self._log_path}"
        if answer.kind == "error":
            raise UserCodeError("raised", f"{path} {answer.value}")
        if answer.kind == "late":
            raise UserCodeError(
                "timeout", f"{path} took more than {self._timeout_s:g} s (--reward-timeout-s) and was ended{log_hint}"
            )
        if answer.kind == "unloaded":
            raise UserCodeError(
                "timeout", f"{path} is in a module that did not load within {_LOAD_LIMIT_S:g} s{log_hint}"
            )
        if answer.kind == "crashed":
            raise UserCodeError("crashed", f"{path} ended its process {answer.value}{log_hint}")
        if self._closed:
            raise RunStopped("the run ended while user code was running")
        raise UserCodeError("crashed", f"{path} lost its process{log_hint}")

    def _enter(self, worker: _Worker, request: _Request) -> _Call:
        call = _Call(next(self._numbers), asyncio.get_running_loop())
        operation, path, rest = request
        worker.calls[call.number] = call
        worker.send(pickle.dumps((operation, call.number, path, rest), 5))
        return call

    def _cancel(self, worker: _Worker, call: _Call) -> None:
        if worker.usable:
            worker.send(pickle.dumps(("cancel", call.number)))

    def _kill_if_in(self, worker: _Worker, call: _Call) -> None:
        """A call that did not heed its cancellation holds up the loop, or hides: replace its worker."""
        if not call.done.done():
            log.warning("user code did not heed its cancellation; its worker is replaced (see %s)", self._log_path)
            worker.kill()
            call.end(_Answer("disturbed"))

    # -- workers ----------------------------------------------------------------------------------------------------

    async def _take_idle(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.usable:
                return worker
        async with self._start_lock:
            return await self._start("single")

    async def _shared_worker(self) -> _Worker:
        async with self._start_lock:
            if self._shared is None or not self._shared.usable:
                self._shared = await self._start("shared")
            return self._shared

    async def _start(self, mode: Mode) -> _Worker:
        if self._closed:
            raise RunStopped("the run ended while user code was waiting")
        ours, theirs = socket.socketpair()
        try:
            if self._guard is None:
                self._guard = _start_guard(self._marker)
            process = self._launch(mode, theirs)
        except OSError as error:
            ours.close()
            raise UserCodeError(
                "crashed", f"a worker for user code cannot be started: {error.strerror or error}"
            ) from error
        finally:
            theirs.close()
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        worker = _Worker(process=process, reader=reader, writer=writer)
        self._watches[asyncio.create_task(self._watch(worker), name="user-worker")] = worker
        return worker

    def _launch(self, mode: Mode, theirs: socket.socket) -> subprocess.Popen[bytes]:
        arguments = (mode, theirs.fileno(), os.getpid(), str(self._folder))
        code = f"{_FIND_SILVA}; from silva.processes.user_worker import main; del sys.path[0]; main(*{arguments!r})"
        with ExitStack() as stack:
            output = stack.enter_context(self._log_path.open("ab"))
            return subprocess.Popen(
                [sys.executable, "-P", "-X", f"utf8={sys.flags.utf8_mode}", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._folder,
                env={**trainer_environment(), RUN_MARKER: self._marker},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    async def _watch(self, worker: _Worker) -> None:
        """Take the worker's frames until it ends, then settle what it left."""
        reading = asyncio.create_task(self._read(worker))
        loop, pid_fd = asyncio.get_running_loop(), _pid_fd(worker.process.pid)
        gone = asyncio.Event()
        if pid_fd is not None:
            # Its socket may live on in a child that user code forked: the end of the process is what counts.
            loop.add_reader(pid_fd, lambda: (gone.set(), worker.ended.set()))
        while not await _set_within(worker.ended, _LOG_LOOK_S):
            _cut_log(self._log_path)
        if pid_fd is not None:
            if not worker.rubbish:
                await _set_within(
                    gone, _DRAIN_S
                )  # a link that ended tells of a process that ends: how, it tells itself
            loop.remove_reader(pid_fd)
            os.close(pid_fd)
        worker.kill_group()
        await asyncio.wait([reading], timeout=_DRAIN_S)
        reading.cancel()
        code = await asyncio.to_thread(worker.process.wait)
        worker.reaped = True
        worker.writer.close()
        how = "(what it sent cannot be read)" if worker.rubbish else _end_in_words(code)
        for call in worker.calls.values():
            call.end(_Answer("crashed", how))
        if worker in self._idle:
            self._idle.remove(worker)
        self._watches = {task: other for task, other in self._watches.items() if other is not worker}
        _cut_log(self._log_path)

    async def _read(self, worker: _Worker) -> None:
        try:
            while True:
                size = int.from_bytes(await worker.reader.readexactly(HEADER_BYTES), "big")
                frame = None if size > MAX_RESULT_BYTES else _frame(await worker.reader.readexactly(size))
                if frame is None:
                    worker.rubbish = True
                    break
                kind, number, value = frame
                call = worker.calls.get(number)
                if call is None:
                    continue
                if kind == "started":
                    call.begin()
                    continue
                call.end(_Answer(kind, value))
                del worker.calls[number]
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            worker.ended.set()


class _Values(pickle.Unpickler):
    """Plain values alone: no class or function is looked up, whatever a worker sends."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is no plain value")


def _frame(body: bytes) -> tuple[Any, int, Any] | None:
    """What a worker sent: kind, number of the call, value; None for what no worker sends by itself."""
    try:
        kind, number, *rest = _Values(io.BytesIO(body)).load()
    except Exception:  # noqa: BLE001  rubbish makes pickle raise anything
        return None
    known = kind in ("started", "value", "error", "cancelled") and isinstance(number, int) and len(rest) <= 1
    return (kind, number, rest[0] if rest else None) if known else None


async def _set_within(event: asyncio.Event, limit_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), limit_s)
    except TimeoutError:
        return False
    return True


def _cut_log(path: Path) -> None:
    """Keep the end of a log that has become too long. Its writers append, so they go on after it."""
    try:
        size = path.stat().st_size
        if size <= MAX_LOG_BYTES:
            return
        with path.open("rb") as file:
            file.seek(size - _LOG_TAIL_BYTES)
            tail = file.read(_LOG_TAIL_BYTES)
        os.truncate(path, 0)
        with path.open("ab") as file:
            file.write(b"... (silva cut what stood here: the log had %d bytes)\n" % size + tail)
    except OSError as error:
        log.warning("%s grows, and cannot be cut: %s", path, error.strerror or error)


_ROOT = str(Path(silva.__file__ or "").resolve().parent.parent)
_FIND_SILVA = f"import sys; sys.path.insert(0, {_ROOT!r})"


def _start_guard(marker: str) -> subprocess.Popen[bytes]:
    """A small process that outlives the trainer by a moment: when its input closes, it ends all that carries `marker`.

    It finds children of user code too, those that left the worker's process group as well.
    """
    code = (
        f"{_FIND_SILVA}; from silva.processes.sweep import sweep_run; sys.stdin.buffer.read(); "
        f"sweep_run({marker!r}, grace_s=0.0, pause_s=0.02)"
    )
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={},
        start_new_session=True,
    )


def _dismiss(guard: subprocess.Popen[bytes]) -> None:
    assert guard.stdin is not None
    guard.stdin.close()
    try:
        guard.wait(timeout=_END_LIMIT_S)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


def _pid_fd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None  # no such call on this system: the end of the socket has to do


def _end_in_words(code: int) -> str:
    if code >= 0:
        return f"(exit status {code})"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"({name}{'; is memory short?' if -code == signal.SIGKILL else ''})"
