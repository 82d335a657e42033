"""An engine that answers from a script: to try agents, gateways and schedules without a model."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Literal, Protocol, TextIO

import msgspec

from silva.inference.engine import ImageSupport
from silva.types import (
    Clock,
    ConfigError,
    EngineFault,
    EngineUsage,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    VersionSpan,
    WeightSource,
    system_reason,
)

MISSING_LOGPROB = -0.5
DEFAULT_CONTEXT_LEN = 32768
MAX_SHOWN_ERRORS = 10


class ScriptLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One answer of a script.

    Example: `{"text": "yes", "delay_s": 0.2}` or `{"ids": [5, 6], "logprobs": [-0.1, -2.0], "finish_reason": "length"}`
    """

    text: str | None = None
    """Encoded as the model would have sampled it; None where `ids` are given."""
    ids: list[int] | None = None
    """The sampled ids as they are; none at all are an engine fault."""
    logprobs: list[float] | None = None
    """One per id; None for -0.5 each. Another number of them is an engine fault."""
    finish_reason: FinishReason = "stop"
    """Why the answer ends."""
    append_eos: bool | None = None
    """Add the end-of-turn id; None adds it where the answer ends by stop."""
    delay_s: float = 0.0
    """Seconds before the first token."""
    abort_after: int | None = None
    """Return so many ids and an abort; None for a whole answer."""
    weight_version: int | None = None
    """The version that the ids carry; None for the engine's own."""
    error: Literal["500", "reset", "hang", "bad_json"] | None = None
    """Fail in this way instead of answering."""
    per_token_s: float = 0.0
    """Seconds for each token."""


class ScriptCodec(Protocol):
    """The part of a turn codec that a script needs."""

    def encode_sampled(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def end_of_turn_id(self) -> int: ...


def read_script(path: Path) -> list[ScriptLine]:
    """Read and check a script file. Raises ConfigError with the line numbers of what is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--engine-script {path} cannot be read: {system_reason(error)}") from error
    lines: list[ScriptLine] = []
    faults: list[str] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        if not raw.strip():
            continue
        try:
            lines.append(_read_line(raw))
        except (ValueError, RecursionError) as error:
            faults.append(f"line {number}: {error}")
    if faults:
        more = f"\n... and {len(faults) - MAX_SHOWN_ERRORS} more" if len(faults) > MAX_SHOWN_ERRORS else ""
        shown = "\n".join(faults[:MAX_SHOWN_ERRORS])
        raise ConfigError(f"--engine-script {path} holds {len(faults)} bad line(s):\n{shown}{more}")
    if not lines:
        raise ConfigError(f"--engine-script {path} holds no answer; write one JSON object a line")
    return lines


def _read_line(raw: str) -> ScriptLine:
    try:
        line = msgspec.json.decode(raw.encode(), type=ScriptLine)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error} (fields of a line: {', '.join(ScriptLine.__struct_fields__)})") from error
    if line.error is None and (line.text is None) == (line.ids is None):
        raise ValueError("an answer needs one of `text` and `ids` (or an `error`)")
    if line.text is not None and line.ids is not None:
        raise ValueError("an answer has `text` and `ids`; give one of them")
    if any(token < 0 or token >= 1 << 31 for token in line.ids or ()):
        raise ValueError(f"`ids` holds a number that is no token id: {line.ids}")
    for name in ("delay_s", "per_token_s"):
        value = getattr(line, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"`{name}` is {value}; it must be a number of seconds >= 0")
    if line.abort_after is not None and line.abort_after < 0:
        raise ValueError(f"`abort_after` is {line.abort_after}; it must be a number of tokens >= 0")
    if line.weight_version is not None and line.weight_version < 0:
        raise ValueError(f"`weight_version` is {line.weight_version}; it must be >= 0")
    return line


class ScriptedEngine:
    """Engine whose n-th call of a session (attempts included) takes line n of its script, over and over.

    It obeys `max_new_tokens` and stop strings like a real engine; it does not stop at stop ids by itself. Every call is
    written to `log_path` (one JSON object a line, flushed) before it is answered. All waits run on the injected clock.
    """

    image_support: ImageSupport = "any"
    """It reads no image, so it takes them all."""

    def __init__(
        self,
        lines: Sequence[ScriptLine],
        *,
        codec: ScriptCodec,
        clock: Clock,
        log_path: Path | None = None,
        max_context_len: int = DEFAULT_CONTEXT_LEN,
    ):
        assert lines, "a script needs at least one answer"
        self._lines = list(lines)
        self._codec = codec
        self._clock = clock
        self._log_path = log_path
        self._log: TextIO | None = None
        self._stack = ExitStack()
        self.max_context_len = max_context_len
        self.version = 0
        self._num_calls: Counter[str] = Counter()
        self._aborted: dict[str, asyncio.Event] = {}
        self._encoded: dict[int, list[int]] = {}
        self._started_s = clock.monotonic_s()

    def rewrite(self, lines: Sequence[ScriptLine]) -> None:
        """Take these lines from now on; every session begins with the first of them."""
        assert lines, "a script needs at least one answer"
        self._lines = list(lines)
        self._num_calls.clear()
        self._encoded.clear()

    async def start(self) -> None:
        self._started_s = self._clock.monotonic_s()
        if self._log_path is None:
            return
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log = self._stack.enter_context(self._log_path.open("a", encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"--engine-log {self._log_path} cannot be written: {system_reason(error)}") from error

    async def close(self) -> None:
        for event in self._aborted.values():
            event.set()
        self._log = None
        self._stack.close()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        number = self._num_calls[request.session_id]
        self._num_calls[request.session_id] += 1
        self._write_log(request)
        index = number % len(self._lines)
        line = self._lines[index]
        version = self.version if line.weight_version is None else line.weight_version
        aborted = self._aborted[request.request_id] = asyncio.Event()
        try:
            return await self._answer(request, line, index, version, aborted)
        finally:
            if self._aborted.get(request.request_id) is aborted:
                del self._aborted[request.request_id]

    async def abort(self, request_id: str) -> None:
        event = self._aborted.get(request_id)
        if event is not None:
            event.set()

    async def load_weights(self, source: WeightSource) -> None:
        """There are no weights to load; later answers carry the version of the source."""
        self.version = source.version

    async def close_session(self, session_id: str) -> None:
        self._num_calls.pop(session_id, None)

    def usage(self) -> EngineUsage:
        return EngineUsage(num_running=len(self._aborted))

    async def _answer(
        self, request: GenerateRequest, line: ScriptLine, index: int, version: int, aborted: asyncio.Event
    ) -> GenerateResult:
        if not await self._pause(line.delay_s, aborted):
            return self._result([], None, "abort", version)
        if line.error == "hang":
            await aborted.wait()
            return self._result([], None, "abort", version)
        if line.error is not None:
            raise EngineFault(_FAULTS[line.error])
        ids, finish, stop = self._limited(request, line, index)
        since_s = self._clock.monotonic_s()
        if not await self._pause(line.per_token_s * len(ids), aborted):
            done = min(len(ids), int((self._clock.monotonic_s() - since_s) / line.per_token_s))
            return self._result(ids[:done], line.logprobs, "abort", version)
        return self._result(ids, line.logprobs, finish, version, stop)

    def _limited(
        self, request: GenerateRequest, line: ScriptLine, index: int
    ) -> tuple[list[int], FinishReason, str | None]:
        """The line's ids as far as the request lets them come."""
        ids, finish = self._ids(line, index), line.finish_reason
        matched: str | None = None
        at, stop = self._find_stop(ids, request.sampling.stop)
        if stop is not None:
            ids, finish, matched = ids[:at], "stop", stop
        if line.abort_after is not None and line.abort_after < len(ids):
            ids, finish, matched = ids[: line.abort_after], "abort", None
        if len(ids) > request.sampling.max_new_tokens:
            ids, finish, matched = ids[: request.sampling.max_new_tokens], "length", None
        return ids, finish, matched

    def _ids(self, line: ScriptLine, index: int) -> list[int]:
        known = self._encoded.get(index)
        if known is None:
            known = list(line.ids) if line.ids is not None else self._codec.encode_sampled(line.text or "")
            if line.append_eos if line.append_eos is not None else line.finish_reason == "stop":
                known.append(self._codec.end_of_turn_id())
            self._encoded[index] = known
        return list(known)

    def _find_stop(self, ids: list[int], stops: Sequence[str]) -> tuple[int, str | None]:
        """How many ids it takes until a stop string is complete, and which."""
        if not stops or not any(stop in self._codec.decode(ids) for stop in stops):
            return 0, None
        for num in range(1, len(ids) + 1):
            text = self._codec.decode(ids[:num])
            for stop in stops:
                if stop in text:
                    return num, stop
        return 0, None

    def _result(
        self,
        ids: list[int],
        logprobs: list[float] | None,
        finish: FinishReason,
        version: int,
        stop: str | None = None,
    ) -> GenerateResult:
        values = [MISSING_LOGPROB] * len(ids) if logprobs is None else logprobs[: len(ids)]
        if len(values) != len(ids):
            raise EngineFault(f"the script gives {len(values)} logprobs for {len(ids)} ids")
        spans = (VersionSpan(start=0, length=len(ids), version=version),) if ids else ()
        return GenerateResult(
            ids=ids,
            logprobs=values,
            kept_mass=[1.0] * len(ids),
            finish_reason=finish,
            version_spans=spans,
            matched_stop=stop,
        )

    async def _pause(self, seconds: float, aborted: asyncio.Event) -> bool:
        """Let time pass. False: an abort came first."""
        if aborted.is_set() or seconds <= 0:
            return not aborted.is_set()
        sleep = asyncio.ensure_future(self._clock.sleep(seconds))
        stop = asyncio.ensure_future(aborted.wait())
        try:
            await asyncio.wait({sleep, stop}, return_when=asyncio.FIRST_COMPLETED)
            return sleep.done()
        finally:
            sleep.cancel()
            stop.cancel()

    def _write_log(self, request: GenerateRequest) -> None:
        if self._log is None:
            return
        entry = {
            "session_id": request.session_id,
            "request_id": request.request_id,
            "attempt": request.attempt,
            "input_ids": list(request.input_ids),
            "sampling_params": asdict(request.sampling),
            "images": [media.digest for media in request.media],
            "t": self._clock.monotonic_s() - self._started_s,
        }
        self._log.write(json.dumps(entry) + "\n")
        self._log.flush()


_FAULTS = {
    "500": "the engine answered status 500",
    "reset": "the engine closed the connection",
    "bad_json": "the engine's answer is no JSON",
}
