"""The process in which functions of the user run. It is started with a socket's path and a mode:

    single   one call at a time on the main thread (so that `signal.alarm` and `asyncio.run` work)
    shared   calls of async functions, many at once, on one event loop

Its messages are listed in `frames`. A value is made plain first (numbers, texts, lists, dicts), so that the trainer
loads no class of the user. What user code prints goes to the log, never into the messages.

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
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from silva.processes.frames import FrameBuffer, Message, pack

if TYPE_CHECKING:
    import asyncio

Function = Callable[..., Any]
MAX_RESULT_BYTES = 16 << 20
_MAX_TEXT = 4000
_OURS = ("<frozen ", "<string>", __file__)
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep


class Unusable(Exception):
    """The function cannot be loaded, or its value cannot be handed over. The text is for the function's author."""


class Link:
    """The socket to the trainer."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self._frames = FrameBuffer()
        self._pid = os.getpid()

    def receive(self) -> list[Message]:
        """Wait for the next messages. Returns at least one; none when the trainer closed the link."""
        while data := self.socket.recv(1 << 20):
            if messages := self._frames.feed(data):
                return messages
        return []

    def send(self, *message: object) -> None:
        self._write(pack(*message))

    def _write(self, frame: bytes) -> None:
        if os.getpid() != self._pid:
            os._exit(1)  # user code forked, and its child returned to here: its parent answers
        self.socket.sendall(frame)

    def answer(self, number: int, value: Callable[[], object]) -> None:
        """Send what `value()` returns, made plain, or the error, after the user's output was flushed to the log."""
        try:
            frame = pack("value", number, plain(value()))
            if len(frame) > MAX_RESULT_BYTES:
                raise Unusable(f"returned {len(frame):,} bytes; at most {MAX_RESULT_BYTES:,} can be handed over")
        except BaseException as error:  # noqa: BLE001  user code may raise anything, and only its call may fail
            frame = pack("error", number, failed(error))
        for stream in (sys.stdout, sys.stderr):  # first: the caller finds in the log what its call printed
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        self._write(frame)


@cache
def load(path: str) -> Function:
    """Import the function of a dotted path, once. Raises Unusable with a hint."""
    module_name, _, name = path.rpartition(".")
    if not all(part.isidentifier() for part in path.split(".")) or not module_name:
        near = path.replace(":", ".").replace("/", ".").replace(".py.", ".").strip(".")
        hint = f"; did you mean {near}?" if near != path and "." in near else ""
        raise Unusable(f"it must be written as module.function or package.module.function{hint}")
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # a module of the user may raise anything, SystemExit too
        raise Unusable(_why_no_module(module_name, error)) from error
    found = getattr(module, name, None)
    if found is None:
        close = difflib.get_close_matches(name, [key for key in vars(module) if not key.startswith("__")], n=1)
        hint = f"; did you mean {module_name}.{close[0]}?" if close else ""
        raise Unusable(f"{getattr(module, '__file__', module_name)} has no {name!r}{hint}")
    if not callable(found):
        raise Unusable(f"it is a {type(found).__name__}, which is not callable")
    return found


def _why_no_module(module_name: str, error: BaseException) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is None or not f"{module_name}.".startswith(f"{missing}."):
        return f"importing {module_name} failed: {describe(error)}"
    folder = sys.path[0]
    close = difflib.get_close_matches(missing, [item.name for item in pkgutil.iter_modules([folder])], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"there is no module {missing!r} (looked in {folder} first, where silva was started){hint}"


def check(path: str, params: Sequence[str], optional: Sequence[str]) -> tuple[bool, Sequence[str]]:
    """Whether the function is async, and which of the optional parameters it takes: all or none. Raises Unusable.

    A function takes them when it cannot be called without them, or when it has parameters of these names there.
    Example: of `optional=("group",)`, `f(rows, group)`, `f(rows, group=None)` and `f(rows, view)` take it, `f(rows)`,
    `f(rows, scale=1.0)` and `f(rows, **more)` do not.
    """
    function = load(path)
    try:
        signature = inspect.signature(function)
    except ValueError:
        return is_async(function), ()  # a builtin without a signature
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


def is_async(function: Function) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def plain(value: object) -> object:
    """Convert `value` to numbers, texts, lists and dicts. Raises Unusable for what has no such form.

    Example: `{"a": (np.float32(0.5), np.ones(2))}` becomes `{"a": [0.5, [1.0, 1.0]]}`.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # a member of a StrEnum becomes a plain text
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        items = [(plain(key), plain(item), type(key).__name__) for key, item in value.items()]
        for key, _, kind in items:
            if isinstance(key, list | dict):
                raise Unusable(f"returned a dict with a {kind} as a key; keys are texts, numbers or None")
        return {key: item for key, item, _ in items}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if inspect.iscoroutine(value):
        value.close()
        raise Unusable("returned a coroutine that nothing awaited; declare the function with `async def`")
    to_list = getattr(value, "tolist", None)  # arrays, tensors, and their own kinds of numbers
    if callable(to_list):
        return plain(to_list())
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise Unusable(f"returned a {kind}, which cannot be handed over; return numbers, texts, lists and dicts")


def describe(error: BaseException) -> str:
    """Return the error's own line and the last lines of the user's code that led to it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    what = "".join(traceback.format_exception_only(error)).strip()
    if not isinstance(error, SyntaxError):  # it names its own line, and what is above it is the import
        calls = [call for call in traceback.extract_tb(error.__traceback__) if not call.filename.startswith(_OURS)]
        own = [call for call in calls if not _is_library(call.filename)]
        what = "\n".join([what, *traceback.format_list((own or calls)[-3:])]).rstrip()
    return what if len(what) <= _MAX_TEXT else f"{what[:_MAX_TEXT]} ..."


def _is_library(filename: str) -> bool:
    return filename.startswith(_LIBRARY) or f"{os.sep}site-packages{os.sep}" in filename


def failed(error: BaseException) -> str:
    """Return what is reported about a call that ended with `error`; the whole traceback goes to the log."""
    if isinstance(error, Unusable):
        return str(error)
    with contextlib.suppress(OSError, ValueError):  # the log cannot be written
        traceback.print_exception(error, file=sys.stderr)
    ends = isinstance(error, SystemExit | KeyboardInterrupt)
    return f"{'tried to end its process:' if ends else 'raised'} {describe(error)}"


def serve_single(link: Link, folder: str) -> None:
    """Make one call after the other, until the link closes."""
    while messages := link.receive():
        for operation, number, path, rest in messages:
            link.answer(number, lambda: check(path, *rest) if operation == "check" else _call(link, number, path, rest))  # noqa: B023
            os.chdir(folder)  # a call that changed the folder must not reach into the next one


def _call(link: Link, number: int, path: str, arguments: bytes) -> object:
    function, args = load(path), pickle.loads(arguments)
    link.send("started", number, None)
    try:
        value = function(*args)
        if is_async(function):
            import asyncio

            value = asyncio.run(value)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # a timer that still runs must not reach into the next call
    return value


async def serve_shared(link: Link) -> None:
    """Make calls of async functions at the same time, until the link closes."""
    import asyncio

    loop = asyncio.get_running_loop()
    running: dict[int, asyncio.Task[object]] = {}
    closed = asyncio.Event()

    async def call(number: int, path: str, arguments: bytes) -> object:
        function, args = load(path), pickle.loads(arguments)
        link.send("started", number, None)
        return await function(*args)

    def end(number: int, task: asyncio.Task[object]) -> None:
        del running[number]
        if task.cancelled():
            link.send("cancelled", number, None)
        else:
            link.answer(number, task.result)

    def take() -> None:
        messages = link.receive()
        if not messages:
            closed.set()
        for operation, number, *rest in messages:
            if operation == "call":
                running[number] = loop.create_task(call(number, *rest))
                running[number].add_done_callback(partial(end, number))
            elif number in running:
                running[number].cancel()

    loop.add_reader(link.socket, take)
    await closed.wait()


def main(mode: str, link_path: str, name: str, folder: str) -> None:
    """Serve until the trainer closes the link. `folder` is searched first for modules of the user."""
    sys.path.insert(0, folder)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]  both are text files
    link = Link(link_path)
    link.send("hello", name, os.getpid())
    if mode == "shared":
        import asyncio

        try:
            asyncio.new_event_loop().run_until_complete(serve_shared(link))
        finally:
            os._exit(1)  # a task raised SystemExit, or the link closed: threads of user code must not delay the end
    else:
        serve_single(link, folder)
