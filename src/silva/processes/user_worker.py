"""The process in which functions of the user run. It is started with a socket and a mode:

    single   one call at a time on the main thread (so that `signal.alarm` works)
    shared   calls of async functions, many at once, on one event loop

Frames are a length of 8 bytes and a pickle. To here: (`check`, id, path, parameter names), (`call`, id, path, pickled
arguments), (`cancel`, id). From here: (`started`, id), then one of (`value`, id, value), (`error`, id, text) and
(`cancelled`, id). A value is made plain first (numbers, texts, lists, dicts), so that the trainer loads no class of the
user. What user code prints goes to the log, never into the frames.

Standard library only, and of silva only what arguments are made of: it starts in a few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import os
import pickle
import pkgutil
import signal
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from types import TracebackType
from typing import Any

HEADER_BYTES = 8
MAX_RESULT_BYTES = 16 << 20
_MAX_TEXT = 4000
_PR_SET_PDEATHSIG = 1
_TIMERS = tuple(
    getattr(signal, name) for name in ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF") if hasattr(signal, name)
)
_OURS = ("<frozen ", "<string>", __file__)
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep


class Unusable(Exception):
    """The function cannot be loaded, or gave something that cannot be handed over; the text is for its author."""


class Link:
    """The socket to the trainer. Sending is safe from any thread; a trainer that is gone ends the process."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def receive(self) -> tuple[Any, ...] | None:
        """The next frame, None when the trainer closed the link."""
        header = self._read(HEADER_BYTES)
        body = header and self._read(int.from_bytes(header, "big"))
        return pickle.loads(body) if body else None

    def send(self, *frame: object) -> None:
        if os.getpid() != self._pid:
            os._exit(1)  # user code forked, and its child came back to here
        body = pickle.dumps(frame, protocol=5)
        if len(body) > MAX_RESULT_BYTES:
            text = f"returned {len(body):,} bytes; at most {MAX_RESULT_BYTES:,} can be handed over"
            body = pickle.dumps(("error", frame[1], text), protocol=5)
        with self._lock:
            try:
                self._socket.sendall(len(body).to_bytes(HEADER_BYTES, "big") + body)
            except OSError:
                os._exit(1)

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._socket.recv(min(size - len(data), 1 << 20))
            except OSError:
                return None
            if not part:
                return None
            data += part
        return bytes(data)


class Functions:
    """Functions by their dotted path, imported once."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._loaded: dict[str, Callable[..., Any]] = {}

    def load(self, path: str) -> Callable[..., Any]:
        """Raises Unusable with what to do."""
        if path not in self._loaded:
            self._loaded[path] = self._import(path)
        return self._loaded[path]

    def _import(self, path: str) -> Callable[..., Any]:
        module_name, _, name = path.rpartition(".")
        if not all(part.isidentifier() for part in path.split(".")) or not module_name:
            near = path.replace(":", ".").replace("/", ".").replace(".py.", ".").strip(".")
            hint = f"; did you mean {near}?" if near != path and "." in near else ""
            raise Unusable(f"it must be written as module.function or package.module.function{hint}")
        try:
            module = importlib.import_module(module_name)
        except BaseException as error:  # a module of the user may raise anything, SystemExit too
            raise Unusable(self._why_no_module(module_name, error)) from error
        found = getattr(module, name, None)
        if found is None:
            close = difflib.get_close_matches(name, [key for key in vars(module) if not key.startswith("__")], n=1)
            hint = f"; did you mean {module_name}.{close[0]}?" if close else ""
            raise Unusable(f"{getattr(module, '__file__', module_name)} has no {name!r}{hint}")
        if not callable(found):
            raise Unusable(f"it is a {type(found).__name__}, which is not callable")
        return found

    def _why_no_module(self, module_name: str, error: BaseException) -> str:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module_name}.".startswith(f"{missing}."):
            return f"importing {module_name} failed: {describe(error)}"
        near = [item.name for item in pkgutil.iter_modules([self._folder])]
        close = difflib.get_close_matches(missing, near, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"there is no module {missing!r} (looked in {self._folder} first, where silva was started){hint}"


def check(
    functions: Functions, path: str, params: Sequence[str], optional: Sequence[str] = ()
) -> tuple[bool, Sequence[str]]:
    """Whether the function is async, and which of the optional parameters it takes: all or none. Raises Unusable.

    A function takes them when it cannot be called without them, or when it has parameters of these names there.
    Example: of `optional=("group",)`, `f(rows, group)`, `f(rows, group=None)` and `f(rows, view)` take it, `f(rows)`,
    `f(rows, scale=1.0)` and `f(rows, **more)` do not.
    """
    function = functions.load(path)
    try:
        signature = inspect.signature(function)
    except ValueError:
        return is_async(function), ()  # a builtin that does not tell its signature
    accepts = optional if _takes(signature, params, optional) else ()
    try:
        signature.bind(*params, *accepts)
    except TypeError as error:
        raise Unusable(f"it is called with ({', '.join(params)}), but takes {signature}: {error}") from error
    return is_async(function), accepts


def _takes(signature: inspect.Signature, params: Sequence[str], optional: Sequence[str]) -> bool:
    try:
        given = signature.bind(*params, *optional).arguments
    except TypeError:
        return False
    try:
        signature.bind(*params)
    except TypeError:
        return True
    return all(given.get(name) == name for name in optional)


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def plain(value: object) -> object:
    """`value` as numbers, texts, lists and dicts. Raises Unusable for what has no such form."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # not of a class of its own, as a member of a StrEnum is
    if isinstance(value, bytes):
        return bytes(memoryview(value))
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return {_plain_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if inspect.iscoroutine(value):
        value.close()
        raise Unusable("returned a coroutine that nothing awaited; declare the function with `async def`")
    to_list = getattr(value, "tolist", None)  # arrays and tensors, and numbers of theirs that are no Python numbers
    if callable(to_list):
        return plain(to_list())
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise Unusable(f"returned a {kind}, which cannot be handed over; return numbers, texts, lists and dicts")


def _plain_key(key: object) -> object:
    plain_key = plain(key)
    if isinstance(plain_key, list | dict):
        raise Unusable(f"returned a dict with a {type(key).__name__} as a key; keys are texts, numbers or None")
    return plain_key


def describe(error: BaseException) -> str:
    """The error's own line, and the last lines of the user's code on the way to it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    what = "".join(traceback.format_exception_only(error)).strip()
    own = isinstance(error, SyntaxError)  # it names its own line, and what stands above it is the import
    lines = [] if own else traceback.format_list(_own_frames(error.__traceback__))
    where = "".join(lines).rstrip()
    text = f"{what}\n{where}" if where else what
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ..."


def _own_frames(trace: TracebackType | None) -> traceback.StackSummary:
    frames = list(traceback.walk_tb(trace))
    own = [item for item in frames if not _is_foreign(item[0].f_code.co_filename)]
    if not own:
        own = [item for item in frames if not item[0].f_code.co_filename.startswith(_OURS)]
    return traceback.StackSummary.extract(iter(own[-3:]))


def _is_foreign(filename: str) -> bool:
    return filename.startswith((*_OURS, _LIBRARY)) or f"{os.sep}site-packages{os.sep}" in filename


def failed(error: BaseException) -> str:
    """What is told of a call that ended with `error`; the whole traceback goes to the log."""
    if isinstance(error, Unusable):
        return str(error)
    ends = isinstance(error, SystemExit | KeyboardInterrupt)
    try:
        text = describe(error)
        traceback.print_exception(error, file=sys.stderr)
    except (OSError, ValueError):
        text = describe(error)  # only the log cannot be written
    except Exception:  # noqa: BLE001  it is an object of the user, whose attributes may raise anything
        text = f"a {type(error).__name__} that cannot be shown"
    return f"tried to end its process: {text}" if ends else f"raised {text}"


def serve_single(link: Link, functions: Functions) -> None:
    """One call after the other, until the link closes."""
    while (frame := link.receive()) is not None:
        operation, number, path, rest = frame
        try:
            if operation == "check":
                value: object = check(functions, path, *rest)
            else:
                value = _call(link, number, functions.load(path), rest)
            link.send("value", number, value)
        except BaseException as error:  # noqa: BLE001  user code may raise anything, and only its call may fail
            link.send("error", number, failed(error))
        finally:
            _tidy(functions)


def _call(link: Link, number: int, function: Callable[..., Any], arguments: bytes) -> object:
    args = pickle.loads(arguments)
    link.send("started", number)
    try:
        if not is_async(function):
            value = function(*args)
        else:
            import asyncio

            value = asyncio.run(function(*args))
    finally:
        _stop_timers()
    return plain(value)


def _stop_timers() -> None:
    for timer in _TIMERS:
        signal.setitimer(timer, 0)


def _tidy(functions: Functions) -> None:
    """Nothing of a call may reach into the next one: no timer that still runs, no other folder."""
    _stop_timers()
    with contextlib.suppress(OSError):
        os.chdir(functions._folder)
    _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def serve_shared(link: Link, functions: Functions) -> None:
    """Calls of async functions at once. A thread reads, so that the loop belongs to the calls alone."""
    import asyncio

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    running: dict[int, asyncio.Task[None]] = {}
    cancelled: set[int] = set()

    async def one(number: int, path: str, arguments: bytes) -> None:
        try:
            function = functions.load(path)
            args = pickle.loads(arguments)
            link.send("started", number)
            link.send("value", number, plain(await function(*args)))
        except BaseException as error:  # noqa: BLE001  user code may raise anything, and only its call may fail
            if number in cancelled or isinstance(error, asyncio.CancelledError):  # also by another call
                link.send("cancelled", number)
            else:
                link.send("error", number, failed(error))
        finally:
            cancelled.discard(number)
            del running[number]
            _flush()

    def never_began(number: int) -> None:
        """A task that is cancelled before its first step runs nothing of itself."""
        if running.pop(number, None) is not None:
            link.send("cancelled", number)

    def take(frame: tuple[Any, ...]) -> None:
        if frame[0] == "call":
            number = frame[1]
            running[number] = loop.create_task(one(*frame[1:]))
            running[number].add_done_callback(lambda _: never_began(number))
        elif frame[1] in running:
            cancelled.add(frame[1])
            running[frame[1]].cancel()

    def read() -> None:
        while (frame := link.receive()) is not None:
            loop.call_soon_threadsafe(take, frame)
        _end_group()

    threading.Thread(target=read, daemon=True, name="silva-link").start()
    while True:
        with contextlib.suppress(KeyboardInterrupt, SystemExit):  # of a task that user code made: its call hears of it
            loop.run_forever()


def _end_group() -> None:
    """The trainer is gone: end this process and what user code started."""
    with contextlib.suppress(OSError):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the trainer dies, however it dies."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main(mode: str, fd: int, parent: int, folder: str) -> None:
    """Serve until the trainer closes the link. `folder` is searched first for modules of the user."""
    die_with(parent)
    sys.path.insert(0, folder)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]  both are text files
    link, functions = Link(fd), Functions(folder)
    if mode == "shared":
        serve_shared(link, functions)
    else:
        serve_single(link, functions)
    _end_group()
