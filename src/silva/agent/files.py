"""The files of a session, RUN_DIR/sessions/<id>/: what the agent reads, what it writes, and its log.

    input.json    the session's input (RELAX_INPUT_JSON)
    output.json   absent until the agent writes it (RELAX_OUTPUT_JSON)
    command.log   everything the agent's processes print
    io/           the agent's own scratch folder (RELAX_SESSION_IO_DIR); it may empty it without losing the others

The session id is the model credential, so only their owner can read the folders. An agent may put anything in place of
a file (a fifo, a folder, a device, a file without end): the trainer does not wait or fail, the session gets a
`SessionFailure`.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from silva.types import SessionFailure, SessionInput, shown
from silva.wire import output_invalid

MAX_OUTPUT_BYTES = 64 << 20
LOG_TAIL_BYTES = 4096
_SAFE_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionFiles:
    """Absolute paths of one session's files; the module head shows the folder."""

    root: Path
    """The session's folder."""
    input_json: Path
    """Written before the agent starts."""
    output_json: Path
    """Absent until the agent writes it."""
    io_dir: Path
    """The agent's scratch folder."""
    command_log: Path
    """Output and errors of the agent's processes."""


def session_files(run_dir: Path, session_id: str) -> SessionFiles:
    """Return the paths of a session; creates nothing. Raises SessionFailure for an id that cannot name a folder."""
    if not _SAFE_ID.match(session_id):
        raise SessionFailure(
            "session_id_invalid",
            f"session id {shown(session_id)} cannot name a folder; use 1 to 128 letters, digits, '-', '_' and '.', "
            f"and do not begin with '.'",
        )
    root = Path(os.path.abspath(run_dir)) / "sessions" / session_id  # noqa: PTH100 (a link stays a link)
    return SessionFiles(
        root=root,
        input_json=root / "input.json",
        output_json=root / "output.json",
        io_dir=root / "io",
        command_log=root / "command.log",
    )


def create_session(run_dir: Path, session_id: str, session_input: SessionInput) -> SessionFiles:
    """Create the session's folder and write its input. Raises SessionFailure if that fails, also for a full disk."""
    files = session_files(run_dir, session_id)
    try:
        files.root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.root.mkdir(mode=0o700)
        files.io_dir.mkdir(mode=0o700)
        write_input(files.root, session_input)
    except OSError as error:
        raise SessionFailure("session_files", f"the files of session {session_id} cannot be made: {error}") from error
    return files


def write_input(root: Path, session_input: SessionInput) -> Path:
    """Write `input.json` in the folder `root` as UTF-8. Raises SessionFailure for values that JSON cannot express."""
    try:
        text = json.dumps(session_input.to_json(), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise SessionFailure("input_invalid", f"the session's input cannot be written as JSON: {error}") from error
    try:
        data = text.encode()
    except UnicodeEncodeError:
        # a dataset row may contain half a surrogate pair: escapes carry it unchanged
        data = json.dumps(session_input.to_json(), allow_nan=False).encode("ascii")
    path = root / "input.json"
    path.write_bytes(data)
    return path


def log_tail(path: Path, limit: int = LOG_TAIL_BYTES) -> str:
    """Return the last `limit` bytes of a log as text, with replacements for what is no UTF-8; "" without a log."""
    try:
        fd = _open_regular(path, extra_flags=os.O_NOFOLLOW)
    except (OSError, SessionFailure):
        return ""
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        file.seek(max(0, size - limit))
        text = file.read(limit).decode("utf-8", "replace")
    return text.lstrip("\ufffd") if size > limit else text


def _open_regular(path: Path, *, extra_flags: int = 0) -> int:
    """Open a regular file; never waits, as a fifo would. Raises OSError, or SessionFailure for another kind of file."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | extra_flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        output_invalid("it is not a regular file")
    return fd


def read_output_bytes(path: Path) -> bytes:
    """Read what the agent wrote, at most 64 MB; b"" without a file. Raises SessionFailure."""
    try:
        fd = _open_regular(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        output_invalid(f"it cannot be opened: {error.strerror}")
    try:
        with os.fdopen(fd, "rb") as file:
            data = file.read(MAX_OUTPUT_BYTES + 1)
    except OSError as error:
        output_invalid(f"it cannot be read: {error.strerror}")
    if len(data) > MAX_OUTPUT_BYTES:
        output_invalid(f"it is larger than {MAX_OUTPUT_BYTES >> 20} MB")
    return data
