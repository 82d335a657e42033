"""The files of a session, RUN_DIR/sessions/<id>/: what the agent reads, what it writes, and its log.

    input.json    the session's input (RELAX_INPUT_JSON)
    output.json   absent until the agent writes it (RELAX_OUTPUT_JSON)
    command.log   everything the agent's processes print
    io/           the agent's own scratch folder (RELAX_SESSION_IO_DIR); it may empty it without losing the others

The session id is the model credential, so the folders are readable by their owner only. Nothing that an agent puts in
place of a file (a fifo, a folder, a device, a file without end) can make the trainer wait or fail: it becomes a
`SessionFailure` of that session.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from silva.credit.reward import MAX_ABS_REWARD
from silva.types.errors import SessionFailure
from silva.types.messages import JsonObject
from silva.types.rollout import SessionInput

MAX_OUTPUT_BYTES = 64 << 20
LOG_TAIL_BYTES = 4096
_MAX_DEPTH = 64
_SHOWN = 60
_SAFE_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\Z")
_BLANK = " \t\r\n"
_REST_BLANK = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionFiles:
    """Absolute paths of one session's files."""

    root: Path
    input_json: Path
    output_json: Path
    io_dir: Path
    command_log: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputDocument:
    """What an agent wrote for an implicit export. `ignored` are the keys of its object that mean nothing."""

    reward: float | None = None
    metadata: JsonObject = field(default_factory=dict[str, Any])
    ignored: tuple[str, ...] = ()


def session_files(run_dir: Path, session_id: str) -> SessionFiles:
    """The paths of a session; makes nothing. Raises SessionFailure for an id that cannot name a folder."""
    if not _SAFE_ID.match(session_id):
        raise SessionFailure(
            "session_id_invalid",
            f"session id {_start_of(session_id)} cannot name a folder; use 1 to 128 letters, digits, '-', '_' and '.', "
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
    """Make the session's folder and write its input. Raises SessionFailure when that fails (also for a full disk)."""
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
    """Write `input.json` in the folder `root` as UTF-8. Raises SessionFailure for values that JSON cannot hold."""
    try:
        text = json.dumps(session_input.to_json(), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise SessionFailure("input_invalid", f"the session's input cannot be written as JSON: {error}") from error
    try:
        data = text.encode()
    except UnicodeEncodeError:
        # Half a surrogate pair in a dataset row: escapes carry it unchanged.
        data = json.dumps(session_input.to_json(), allow_nan=False).encode("ascii")
    path = root / "input.json"
    path.write_bytes(data)
    return path


def log_tail(path: Path, limit: int = LOG_TAIL_BYTES) -> str:
    """The last `limit` bytes of a log as text; what is no UTF-8 is replaced. "" when there is no such file."""
    try:
        fd = _open_regular(path, extra_flags=os.O_NOFOLLOW)
    except (OSError, SessionFailure):
        return ""
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        file.seek(max(0, size - limit))
        text = file.read(limit).decode("utf-8", "replace")
    return text.lstrip("\ufffd") if size > limit else text


def read_output(path: Path) -> OutputDocument:
    """Read what the agent wrote. A missing or blank file is an export without a reward.

    Raises SessionFailure: `output_invalid` (not readable, not JSON, not one object), `reward_invalid`,
    `metadata_invalid`, `explicit_export_not_built`. Blocks for as long as 64 MB take to read and parse.
    """
    return parse_output(_read_output_bytes(path))


def parse_output(data: bytes) -> OutputDocument:
    """The same for a document that came another way than by file."""
    if data.startswith(b"\xef\xbb\xbf"):
        _invalid("it starts with a byte order mark; write plain UTF-8")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        _invalid(f"byte {error.start} (line {line}) is not UTF-8: {data[error.start : error.start + 8]!r}")
    if not text.strip(_BLANK):
        return OutputDocument()
    return _document(_parse(text))


def _document(value: JsonObject) -> OutputDocument:
    if "messages" in value:
        _explicit()
    metadata = value.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise SessionFailure(
            "metadata_invalid", f"metadata in the output file is {_start_of(metadata)}; it must be an object"
        )
    if metadata:
        _check_metadata(metadata)
    return OutputDocument(
        reward=_reward(value.get("reward")),
        metadata=metadata or {},
        ignored=tuple(key for key in value if key not in ("metadata", "reward")),
    )


def _reward(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, dict):
        raise SessionFailure(
            "reward_invalid",
            f"reward in the output file is an object ({_start_of(value)}); reward objects with --reward-key come in a "
            f"later version, write one number",
        )
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SessionFailure(
            "reward_invalid", f"reward in the output file is {_start_of(value)}; write a number or null"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise SessionFailure("reward_invalid", f"reward in the output file is {_start_of(value)}; it must be finite")
    if abs(number) > MAX_ABS_REWARD:
        raise SessionFailure(
            "reward_invalid",
            f"reward in the output file is {_start_of(value)}; its magnitude must be at most {MAX_ABS_REWARD:g}",
        )
    return number


def _check_metadata(metadata: JsonObject) -> None:
    """Refuse what no ledger can keep: numbers that are not finite or exceed 64 bits, broken text, deep nests."""
    stack: list[tuple[str, object, int]] = [("metadata", metadata, 1)]
    while stack:
        where, value, depth = stack.pop()
        if depth > _MAX_DEPTH:
            _bad_metadata(where, f"lies more than {_MAX_DEPTH} levels deep")
        if isinstance(value, dict):
            for key, item in value.items():
                _check_text(f"a key of {where}", key)
                stack.append((f"{where}.{key}", item, depth + 1))
        elif isinstance(value, list):
            stack.extend((f"{where}[{i}]", item, depth + 1) for i, item in enumerate(value))
        elif isinstance(value, str):
            _check_text(where, value)
        elif isinstance(value, float) and not math.isfinite(value):
            _bad_metadata(where, f"is {value}; it must be finite (leave it out, or write null)")
        elif isinstance(value, int) and not -(1 << 63) <= value < (1 << 64):
            _bad_metadata(where, f"is {_start_of(value)}, which needs more than 64 bits; write it as a string")


def _check_text(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        _bad_metadata(where, f"holds half of a surrogate pair at character {error.start}")


def _bad_metadata(where: str, what: str) -> NoReturn:
    shown = where if len(where) <= _SHOWN else f"{where[:_SHOWN]}..."
    raise SessionFailure("metadata_invalid", f"{shown!a} in the output file {what}")


def _explicit() -> NoReturn:
    raise SessionFailure(
        "explicit_export_not_built",
        "the output file holds a record with `messages`: explicit export is not built yet; write one object with "
        "`reward` and `metadata` only",
    )


def _invalid(what: str) -> NoReturn:
    raise SessionFailure("output_invalid", f"the output file cannot be used: {what}")


# -- JSON -----------------------------------------------------------------------------------------------------------


class _DuplicateKeyError(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> JsonObject:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(f"the key {_start_of(key)} stands twice in one object")
            seen.add(key)
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _parse(text: str) -> JsonObject:
    """The one object that the file holds. JSONL of records with `messages` is told apart from a broken document."""
    begin = _skip_blank(text, 0)
    value, end = _decode_at(text, begin)
    rest = _skip_blank(text, end)
    if rest == len(text):
        if isinstance(value, dict):
            return value
        _invalid(f"it holds {_start_of(value)}; write one JSON object")
    if "\n" in text[begin:end] or "\n" not in text[end:rest]:
        _invalid(f"{_place(text, rest)} follows a complete JSON value; it goes on with {_start_of(text[rest:])}")
    values = [value]
    while rest < len(text):
        value, end = _decode_at(text, rest)
        values.append(value)
        rest = _skip_blank(text, end)
    if any(isinstance(value, dict) and "messages" in value for value in values):
        _explicit()
    _invalid(f"it holds {len(values)} JSON values; write one object")


def _decode_at(text: str, begin: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        _invalid(
            f"it is not valid JSON at line {error.lineno} column {error.colno}: {error.msg}; the value starts with "
            f"{_start_of(text[begin : begin + _SHOWN + 1])}"
        )
    except RecursionError:
        _invalid(f"the JSON value at {_place(text, begin)} is nested too deeply")
    except _DuplicateKeyError as error:
        _invalid(f"in the JSON value at {_place(text, begin)}: {error}")
    except ValueError:
        # The one other refusal of the parser: Python converts no integer of more than some thousand digits.
        _invalid(f"an integer in the JSON value at {_place(text, begin)} has too many digits")


def _skip_blank(text: str, begin: int) -> int:
    match = _REST_BLANK.match(text, begin)
    return match.end() if match is not None else begin


def _place(text: str, at: int) -> str:
    return f"line {text.count(chr(10), 0, at) + 1} column {at - text.rfind(chr(10), 0, at)}"


def _start_of(value: object) -> str:
    """The start of a value for an error text: printable ASCII, short whatever the value's size is."""
    if isinstance(value, str):
        return ascii(value[:_SHOWN]) + ("..." if len(value) > _SHOWN else "")
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (dict, list)):
        try:
            text = json.dumps(value)
        except RecursionError:
            text = "a deeply nested value"
    else:
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text[:_SHOWN] + ("..." if len(text) > _SHOWN else "")


# -- bytes ----------------------------------------------------------------------------------------------------------


def _open_regular(path: Path, *, extra_flags: int = 0) -> int:
    """Open a regular file without ever waiting (a fifo would). Raises OSError, or SessionFailure for another kind."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | extra_flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        _invalid("it is not a regular file")
    return fd


def _read_output_bytes(path: Path) -> bytes:
    try:
        fd = _open_regular(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        _invalid(f"it cannot be opened: {error.strerror}")
    try:
        with os.fdopen(fd, "rb") as file:
            data = file.read(MAX_OUTPUT_BYTES + 1)
    except OSError as error:
        _invalid(f"it cannot be read: {error.strerror}")
    if len(data) > MAX_OUTPUT_BYTES:
        _invalid(f"it is larger than {MAX_OUTPUT_BYTES >> 20} MB")
    return data
