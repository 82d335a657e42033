"""Lines between the trainer and the runner: one JSON object a line over a stream socket.

Trainer to runner (`op`):
    hello  {run_id, parent_pid, shell, grace_s, sweep_s}    first, once
    start  {session, command, cwd, env, log}
    kill   {session}
Runner to trainer (`event`):
    ready         {pid}
    started       {session, pid}
    start_failed  {session, error}
    exit          {session, code, signal, killed}   the launcher ended; code or signal is null
    gone          {session, survivors}              nothing of the session is left (survivors: what could not be ended)
    closing       {}                                no more starts are taken; exits and gones still come

The end of the stream means: trainer gone, end everything. Bytes that are no UTF-8 (environment values) travel as lone
surrogates in `\\u` escapes, so that they come out as they went in.

Standard library only: the runner imports this.
"""

from __future__ import annotations

import json

Line = dict[str, object]


def encode(message: Line) -> bytes:
    """One message as one line."""
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


def decode(line: bytes) -> Line:
    """One line as a message. A line that is none breaks a promise between our own parts."""
    message = json.loads(line)
    assert isinstance(message, dict), f"a line between trainer and runner is no object: {line[:80]!r}"
    return message


class LineBuffer:
    """Cuts a byte stream into lines. Only new bytes are searched."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def pop(self) -> bytes | None:
        """The next whole line, or None."""
        end = self._buffer.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._buffer)
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return line
