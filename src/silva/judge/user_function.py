"""Functions of the user (rewards, credit) in processes of their own, so that none can stop, crash or delay the trainer.

What they are trusted with: a function is the user's own code. It may be slow, broken or blocking, crash, print a lot,
and return or raise anything; that costs its own call alone. It is not hostile: nothing here guards against code that
forges messages, hides processes or tampers with the worker that it runs in.

Sync functions run one at a time in a worker, on its main thread; async functions share one worker, many at once. A call
that takes too long, crashes or cannot be handed over is a UserCodeError of that call alone. Workers belong to a runner
process, as agents do: it reports their end, ends what they started, and all of them when the trainer dies. Real
processes keep real time: the bounds here are wall seconds, not the injected clock's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from silva.agent import AgentRunner, AgentSpec, trainer_environment
from silva.processes import RUN_MARKER, child_command, pack, read_message
from silva.types import ConfigError, RunStopped, SilvaError

log = logging.getLogger("silva.rollout")

Reason = Literal["raised", "timeout", "crashed"]
Mode = Literal["single", "shared"]
_Request = tuple[Literal["call", "check"], str, object]
"""The operation, the function's path, and its pickled arguments or its parameters' names."""

WORKERS_PER_CORE = 4
_LOAD_LIMIT_S = 120.0
"""Seconds that importing the user's module may take; the time of the call itself begins after it."""
MAX_LOG_BYTES = 64 << 20
"""Size of the log of user code at which it is cut to its last `_LOG_TAIL_BYTES`."""
_LOG_TAIL_BYTES = 1 << 20


class UserCodeError(SilvaError):
    """A function of the user gave no value. The message has the last lines of the user's own code, if there are any."""

    def __init__(self, reason: Reason, message: str):
        super().__init__(message)
        self.reason: Reason = reason
        """`raised` an error, hit a `timeout`, or `crashed` its process."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """How a call ended. The worker sends `value`, `error` and `cancelled`; this side notices the others.

    | kind        | meaning                                                           | value          |
    | ----------- | ----------------------------------------------------------------- | -------------- |
    | `value`     | the function returned                                             | what it returned |
    | `error`     | it raised, or its value cannot be handed over                     | a text         |
    | `cancelled` | it was cancelled, by the pool or by user code of any call         | None           |
    | `late`      | its time is over                                                  | None           |
    | `unloaded`  | the time of its import is over                                    | None           |
    | `crashed`   | its worker ended by itself                                        | a text         |
    | `disturbed` | its worker was killed or lost because of some other call or event | None           |
    """

    kind: Literal["value", "error", "cancelled", "late", "unloaded", "crashed", "disturbed"]
    value: object = None


class _Call:
    """One call in a worker."""

    def __init__(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.started: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[_Answer] = loop.create_future()

    def take(self, kind: Literal["started", "value", "error", "cancelled"], value: object) -> None:
        """Note what the worker reports about the call."""
        if kind == "started":
            self.started.set_result(None)
        else:
            self.end(_Answer(kind, value))

    def end(self, answer: _Answer) -> None:
        if not self.done.done():
            self.done.set_result(answer)


class _Worker:
    """One worker process and the calls that are in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid: object = None
        self.usable = True
        self.calls: dict[object, _Call] = {}
        self.task: asyncio.Task[_Answer] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._unsent = b""

    def connect(self, writer: asyncio.StreamWriter, pid: object) -> None:
        self._writer, self.pid = writer, pid
        writer.write(self._unsent)

    def send(self, *message: object) -> None:
        """Send a message, or keep it until the worker has connected."""
        if self._writer is None:
            self._unsent += pack(*message)
        elif not self._writer.is_closing():
            self._writer.write(pack(*message))

    def kill(self) -> None:
        """End the process, what it started, and all its calls."""
        assert self.task is not None
        self.usable = False
        self.task.cancel()


@dataclass(eq=False)
class UserFunction:
    """A function of the user that passed its check. Calls may run at the same time, within the bounds of its pool."""

    pool: UserFunctionPool
    path: str
    """`module.function`."""
    _: KW_ONLY
    is_async: bool
    """It is a coroutine function."""
    accepts: tuple[str, ...] = ()
    """Names of the optional parameters that it takes; a call gives their values after the required ones."""

    async def __call__(self, *args: object) -> object:
        """Return its value, made of numbers, texts, lists and dicts. Cancelling ends the call. Raises UserCodeError."""
        return await self.pool.run(self, args)


class UserFunctionPool:
    """Owns the worker processes. All methods belong to one event loop.

    Consumes calls. Waits for a free slot, then for the worker, at most `timeout_s` from the moment the function begins.
    Produces values and UserCodeErrors.

    - A late sync call costs its worker.
    - A late async call is cancelled. If it does not end within `cancel_grace_s`, or if a call crashes, the shared
      worker is replaced. Each call that was in it runs again in a worker of its own, so only the guilty one fails.
    - Workers start on demand, and a worker that died while idle fails no call.

    `max_concurrency`: calls at the same time, sync and async apart; sync calls are also limited to 4 per core.
    `folder`: searched first for the user's modules (None: the current folder). `marker`: the run that all processes of
    user code carry in their environment.
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
        self._log_path = log_path = log_path.absolute()  # workers start in another folder
        self._marker = marker
        self._folder = (folder or Path.cwd()).absolute()
        self._timeout_s = timeout_s
        self._cancel_grace_s = cancel_grace_s
        self._numbers = itertools.count(1)
        self._single_slots = asyncio.Semaphore(min(max_concurrency, WORKERS_PER_CORE * (os.cpu_count() or 1)))
        self._shared_slots = asyncio.Semaphore(max_concurrency)
        self._idle: list[_Worker] = []
        self._shared: _Worker | None = None
        self._lock = asyncio.Lock()
        self._workers: dict[object, _Worker] = {}
        self._runner = AgentRunner(
            run_id=marker, grace_s=0.0, sweep_s=0.05, log_path=log_path, owns="the workers of user functions"
        )
        self._link_folder = tempfile.TemporaryDirectory(prefix="silva-")
        self._server: asyncio.Server | None = None
        self._closed = False

    async def __aenter__(self) -> UserFunctionPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def pids(self) -> list[object]:
        """Process ids of the workers that take calls."""
        return [worker.pid for worker in self._workers.values() if worker.usable and worker.pid]

    async def check(self, path: str, flag: str, params: Sequence[str], optional: Sequence[str] = ()) -> UserFunction:
        """Import the function in a worker. Raises a ConfigError that names `flag` if it cannot take `params`.

        `optional`: further parameters, given only to a function that requires them or declares them by these names.
        """
        try:
            found = await self._alone(("check", path, (tuple(params), tuple(optional))))
        except UserCodeError as error:
            raise ConfigError(f"{flag} {path}: {str(error).removeprefix(f'{path} ')}") from error
        assert isinstance(found, list)
        is_async, accepts = found
        return UserFunction(self, path, is_async=is_async, accepts=tuple(accepts))

    async def run(self, function: UserFunction, args: tuple[object, ...]) -> object:
        """One call; see UserFunction."""
        path = function.path
        packed = await asyncio.to_thread(pickle.dumps, args, 5)  # long samples take a moment: not on the loop
        request = ("call", path, packed)
        try:
            if function.is_async:
                async with self._shared_slots:
                    answer = await self._run_shared(request)
                    if answer.kind not in ("crashed", "disturbed", "cancelled"):
                        return self._value(path, answer)
                    return await self._alone(request)
            return await self._alone(request)
        finally:
            _cut_log(self._log_path)

    async def close(self) -> None:
        """End every worker and everything that user code started, then return. Waiting callers get RunStopped."""
        async with self._lock:  # a worker that starts now is among those that end
            self._closed = True
        for worker in list(self._workers.values()):
            worker.kill()
        await self._runner.close()
        if self._server is not None:
            self._server.close()
        self._link_folder.cleanup()

    # -- one call ---------------------------------------------------------------------------------------------------

    async def _alone(self, request: _Request) -> object:
        """Make one call in a worker of its own. If the worker ended before the call began, try once more."""
        async with self._single_slots:
            answer, began = await self._run_single(request)
            if answer.kind == "crashed" and not began:
                answer, _ = await self._run_single(request)
        return self._value(request[1], answer)

    async def _run_single(self, request: _Request) -> tuple[_Answer, bool]:
        async with self._lock:
            worker = self._idle.pop() if self._idle else await self._start("single")
        call = self._enter(worker, request)
        answer = _Answer("late")
        try:
            answer = await self._wait(call)
        finally:
            # only the end of its process stops sync code; a cancelled caller leaves through here too
            if answer.kind not in ("value", "error"):
                worker.kill()
            elif worker.usable:
                self._idle.append(worker)
        return answer, call.started.done()

    async def _run_shared(self, request: _Request) -> _Answer:
        async with self._lock:
            if self._shared is None or not self._shared.usable:
                self._shared = await self._start("shared")
            worker = self._shared
        call = self._enter(worker, request)
        answer = _Answer("late")
        try:
            answer = await self._wait(call)
        finally:
            if answer.kind in ("late", "unloaded"):
                worker.send("cancel", call.number)
                asyncio.get_running_loop().call_later(self._cancel_grace_s, self._kill_if_in, worker, call)
        if answer.kind not in ("late", "unloaded"):
            return answer
        ended = await call.done
        return ended if ended.kind in ("crashed", "disturbed") else answer

    def _enter(self, worker: _Worker, request: _Request) -> _Call:
        operation, path, rest = request
        call = worker.calls[number] = _Call(number := next(self._numbers))
        worker.send(operation, number, path, rest)
        return call

    async def _wait(self, call: _Call) -> _Answer:
        """Wait for its answer, or until it is late. A check never reports a begin: it is only an import."""
        await asyncio.wait([call.started, call.done], timeout=_LOAD_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        if not call.done.done():
            if not call.started.done():
                return _Answer("unloaded")
            await asyncio.wait([call.done], timeout=self._timeout_s)
        return call.done.result() if call.done.done() else _Answer("late")

    def _kill_if_in(self, worker: _Worker, call: _Call) -> None:
        """Replace the worker of a call that its cancellation did not end: it may block the loop."""
        if not call.done.done():
            log.warning("a user function ignored its cancellation; its worker is replaced (see %s)", self._log_path)
            worker.kill()

    def _value(self, path: str, answer: _Answer) -> object:
        """Return the value of a call. Raises UserCodeError, or RunStopped after the pool was closed."""
        if answer.kind == "value":
            return answer.value
        if answer.kind == "error":
            raise UserCodeError("raised", f"{path} {answer.value}")
        if answer.kind == "disturbed" and self._closed:
            raise RunStopped("the run ended while user code was running")
        text = {
            "late": f"took more than {self._timeout_s:g} s (--reward-timeout-s) and was ended",
            "unloaded": f"is in a module that did not load within {_LOAD_LIMIT_S:g} s",
            "crashed": answer.value,
        }.get(answer.kind, "lost its process")
        reason: Reason = "timeout" if answer.kind in ("late", "unloaded") else "crashed"
        raise UserCodeError(reason, f"{path} {text}; its output is in {self._log_path}")

    # -- workers ----------------------------------------------------------------------------------------------------

    async def _start(self, mode: Mode) -> _Worker:
        """Start a worker. Called under the lock: there is one shared worker, and none starts after `close`."""
        if self._closed:
            raise RunStopped("the run ended while user code was waiting")
        link_path = f"{self._link_folder.name}/link"
        if self._server is None:
            self._server = await asyncio.start_unix_server(self._serve, link_path)
        worker = _Worker(f"worker-{next(self._numbers)}")
        *program, code = child_command("user_worker", mode, link_path, worker.name, str(self._folder), flags=("-P",))
        spec = AgentSpec(
            session_id=worker.name,
            program=tuple(program),
            command=code,
            cwd=self._folder,
            env={**trainer_environment(), RUN_MARKER: self._marker},
            log_path=self._log_path,
        )
        self._workers[worker.name] = worker
        worker.task = asyncio.create_task(self._own(spec), name="user-worker")
        worker.task.add_done_callback(lambda task: self._settle(worker, task))
        return worker

    async def _own(self, spec: AgentSpec) -> _Answer:
        """Run a worker to its end. Returns how the calls that are in it end."""
        try:
            end = await self._runner.run_agent(spec)
        except RunStopped as error:
            return _Answer("crashed", f"got no process: {error}")
        if end.runner_lost:
            return _Answer("disturbed")
        if end.error is not None:
            return _Answer("crashed", f"got no process: {end.error}")
        memory = "; is memory short?" if end.signal == signal.SIGKILL else ""
        return _Answer("crashed", f"ended its process ({end.status}{memory})")

    def _settle(self, worker: _Worker, task: asyncio.Task[_Answer]) -> None:
        worker.usable = False
        del self._workers[worker.name]
        self._idle = [other for other in self._idle if other is not worker]
        for call in worker.calls.values():
            call.end(_Answer("disturbed") if task.cancelled() else task.result())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read what one worker sends, until it ends."""
        hello = await read_message(reader)
        worker = self._workers.get(hello[1]) if hello is not None else None
        if worker is not None and hello is not None:
            worker.connect(writer, hello[2])
            while (message := await read_message(reader)) is not None:
                kind, number, value = message
                call = worker.calls[number]
                call.take(kind, value)
                if call.done.done():
                    del worker.calls[number]
        writer.close()


def _cut_log(path: Path) -> None:
    """Cut a log that is too long to its end. Its writers append, so they continue after it."""
    try:
        size = path.stat().st_size
        if size <= MAX_LOG_BYTES:
            return
        with path.open("rb") as file:
            file.seek(size - _LOG_TAIL_BYTES)
            tail = file.read(_LOG_TAIL_BYTES)
        os.truncate(path, 0)
        with path.open("ab") as file:
            file.write(b"... (silva cut what was here: the log had %d bytes)\n" % size + tail)
    except OSError as error:
        log.warning("%s grows, and cannot be cut: %s", path, error.strerror or error)
