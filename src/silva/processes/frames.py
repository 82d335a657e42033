"""Messages between the trainer and its child processes, and how such a child is started.

A message is a tuple of plain values (numbers, texts, bytes, lists, dicts, None). On the wire it is a length of 4 bytes
(big-endian), then the tuple as `marshal` writes it: both ends are the same interpreter, and no class of the user can
travel. Text that is no UTF-8 (environment values) comes out as it went in.

Trainer to runner:
    ("hello", run_id, parent_pid, grace_s, sweep_s)    first, once
    ("start", session, argv, cwd, env, log)
    ("kill", session)
Runner to trainer:
    ("ready", pid)
    ("started", session, pid)
    ("start_failed", session, error)
    ("exit", session, code, signal, killed)    the launcher ended; code or signal is None
    ("gone", session, survivors)               nothing of the session is left (survivors: what could not be ended)
    ("closing",)                               no more starts are taken; exits and gones still come
Trainer to user worker:
    ("check", number, path, (parameter names, optional names))
    ("call", number, path, pickled arguments)
    ("cancel", number)                         shared workers only
User worker to trainer:
    ("hello", name, pid)                       first, once
    ("started", number, None)                  the module is loaded, the function begins
    ("value", number, value), ("error", number, text) or ("cancelled", number, None)

The end of a stream means: the other side is gone.

Standard library only, without its heavier parts: the runner imports this.
"""

from __future__ import annotations

import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from asyncio import StreamReader
    from typing import Any

    Message = tuple[Any, ...]
else:
    Message = tuple

HEADER_BYTES = 4


def pack(*message: Any) -> bytes:
    """One message as bytes. Raises ValueError for what is no plain value."""
    body = marshal.dumps(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class FrameBuffer:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole with `data`, in order."""
        self._buffer += data
        found: list[Message] = []
        begin = 0
        while (body := begin + HEADER_BYTES) <= len(self._buffer):
            end = body + int.from_bytes(self._buffer[begin:body], "big")
            if end > len(self._buffer):
                break
            found.append(marshal.loads(self._buffer[body:end]))
            begin = end
        del self._buffer[:begin]
        return found


async def read_message(reader: StreamReader) -> Message | None:
    """The next message; None when the other side is gone."""
    try:
        header = await reader.readexactly(HEADER_BYTES)
        return marshal.loads(await reader.readexactly(int.from_bytes(header, "big")))
    except (EOFError, ConnectionError):
        return None


def child_command(module: str, *arguments: object, flags: tuple[str, ...]) -> list[str]:
    """A command that calls `main(*arguments)` of `silva.processes.<module>`, whatever is installed or in the folder.

    The folder of the running package is on the path only while the module is imported.
    """
    root = os.path.abspath(f"{os.path.dirname(__file__)}/../..")  # noqa: PTH100, PTH120  pathlib is slow to import
    code = (
        f"import sys; sys.path.insert(0, {root!r}); from silva.processes.{module} import main; del sys.path[0]; "
        f"main(*{arguments!r})"
    )
    return [sys.executable, *flags, "-X", f"utf8={sys.flags.utf8_mode}", "-c", code]
