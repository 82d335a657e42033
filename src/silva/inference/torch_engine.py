"""The torch engine: our own decoder in its own thread behind the asyncio `Engine` protocol."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import torch

from silva.inference.engine import ImageSupport
from silva.inference.stop_strings import DecodeText
from silva.inference.torch_core import Outcome, TorchCore
from silva.model import DecoderConfig, hf_config_dict, limit_threads, load_weights
from silva.model.decoder import Decoder, WeightsError
from silva.types import (
    ConfigError,
    EngineFault,
    EngineUsage,
    GenerateRequest,
    GenerateResult,
    RequestError,
    SilvaError,
    WeightSource,
)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class TorchEngine:
    """Samples from a local Hugging Face model directory (dense Llama, Qwen2, Qwen3, Mistral shapes).

    Contract: `generate` queues first come, first served; up to `num_slots` requests share each decode step; what a
    session (or another one with the same beginning) has computed under the present weights is not computed again.
    Sampling is keyed by (seed, absolute position), so a seed gives the same ids alone, in a batch, and over an abort
    that resumes with prompt and partial ids; without a seed it derives from the engine's `seed` and the request id.
    That promise ends where kernels round logits differently for other batch shapes and two candidates tie within that
    rounding: negligible in float32, now and then visible in bfloat16.

    `stop_ids` end every response, beside the request's own. `decode_text` turns response ids to text for stop strings
    and is called in the engine's thread. `dtype` defaults to float32 on the CPU and bfloat16 on CUDA.
    """

    def __init__(
        self,
        hf_dir: str | Path,
        *,
        decode_text: DecodeText,
        stop_ids: Collection[int] = (),
        dtype: str | None = None,
        device: str | None = None,
        max_context_len: int | None = None,
        num_slots: int = 32,
        num_threads: int = 1,
        prefill_chunk: int | None = None,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        self._hf_dir = Path(hf_dir)
        self._config = DecoderConfig.from_hf(hf_config_dict(hf_dir), where=str(self._hf_dir / "config.json"))
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        on_cpu = self._device.type == "cpu"
        self._dtype: torch.dtype = getattr(torch, dtype or ("float32" if on_cpu else "bfloat16"))
        self.max_context_len = self._checked_context(max_context_len)
        self.image_support: ImageSupport = "none"
        self._num_slots = num_slots
        self._num_threads = num_threads
        self._new_core = functools.partial(
            TorchCore,
            max_context_len=self.max_context_len,
            num_slots=num_slots,
            stop_ids=stop_ids,
            decode_text=decode_text,
            seed=seed,
            prefill_chunk=prefill_chunk or (512 if on_cpu else 4096),
            version=version,
        )
        self._version = version
        self._core: TorchCore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()
        self._commands: list[Callable[[TorchCore], None]] = []
        self._closing = False
        self._pending: dict[str, asyncio.Future[GenerateResult]] = {}
        self._loads: set[asyncio.Future[None]] = set()

    def _checked_context(self, asked: int | None) -> int:
        limit = self._config.max_positions
        if asked is None:
            return limit
        if not 1 < asked <= limit:
            raise ConfigError(f"max_context_len is {asked}; {self._hf_dir} allows 2 to {limit}")
        return asked

    # ---- Engine protocol, on the event loop ----

    @property
    def version(self) -> int:
        return self._version if self._core is None else self._core.version

    async def start(self) -> None:
        """Load the weights in the engine's thread. Raises ConfigError for a directory that cannot be run."""
        if self._thread is not None:
            raise EngineFault("the torch engine was started twice")
        self._loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(opened,), name="silva-torch-engine", daemon=True)
        self._thread.start()
        await opened

    async def close(self) -> None:
        """Stop the thread and fail what is pending. May be called twice, and before `start`."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._fail_pending("the torch engine was closed")
        self._core = None

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        loop = self._check_request(request)
        future: asyncio.Future[GenerateResult] = loop.create_future()
        self._pending[request.request_id] = future
        self._send(lambda core: core.submit(future, request))
        try:
            return await future
        except asyncio.CancelledError:
            self._send(lambda core: core.cancel(future))
            raise
        finally:
            self._pending.pop(request.request_id, None)

    async def abort(self, request_id: str) -> None:
        self._send(lambda core: core.abort(request_id))

    async def close_session(self, session_id: str) -> None:
        self._send(lambda core: core.table.close_session(session_id))

    async def load_weights(self, source: WeightSource) -> None:
        """Copy torch tensors in between two steps; do not change them until this returns. A folder is read then.

        Raises EngineFault, with the old weights and version in place, when a parameter is missing, unknown, not finite
        or of the wrong shape. Running requests continue under the new weights with a new version span.
        """
        loop = self._check_alive()
        done: asyncio.Future[None] = loop.create_future()

        def load(core: TorchCore) -> None:
            try:
                core.load_weights(source)
            except ConfigError as error:
                self._post(_settle, done, EngineFault(f"weight version {source.version} was not loaded: {error}"))
            else:
                self._post(_settle, done, None)

        self._loads.add(done)
        self._send(load)
        try:
            await done
        finally:
            self._loads.discard(done)

    def usage(self) -> EngineUsage:
        core = self._core
        if core is None:
            return EngineUsage()
        return EngineUsage(
            kv_used_ratio=min(1.0, core.table.num_cached / (self._num_slots * self.max_context_len)),
            num_running=len(core.running),
            num_waiting=len(core.waiting),
            counters=dict(core.counters),
        )

    # ---- event loop side ----

    def _check_alive(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._core is None or self._closing:
            raise EngineFault("the torch engine is not running: start() has not finished, or it was closed")
        return self._loop

    def _check_request(self, request: GenerateRequest) -> asyncio.AbstractEventLoop:
        loop = self._check_alive()
        if request.media:
            raise EngineFault("the torch engine runs text models only; this request carries images: use another engine")
        num_input = len(request.input_ids)
        if num_input == 0:
            raise RequestError("input_ids is empty; an engine needs at least one id to continue", field="input_ids")
        if num_input >= self.max_context_len:
            raise RequestError(
                f"the input holds {num_input} ids; the context of {self.max_context_len} has no room for more",
                field="input_ids",
                code="context_length_exceeded",
            )
        if "" in request.sampling.stop:
            raise RequestError("stop holds an empty string, which every text contains", field="stop")
        if not 0 <= request.num_resumed <= num_input:
            raise RequestError(f"num_resumed is {request.num_resumed} of {num_input} input ids", field="num_resumed")
        if request.request_id in self._pending:
            raise EngineFault(f"request id {request.request_id} is already running; ids must be unique")
        return loop

    def _send(self, command: Callable[[TorchCore], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _fail_pending(self, message: str) -> None:
        for future in self._pending.values():
            _settle(future, EngineFault(message))
        self._fail_loads(message)

    def _fail_loads(self, message: str) -> None:
        for future in self._loads:
            _settle(future, EngineFault(message))

    @staticmethod
    def _deliver(finished: list[tuple[object, Outcome]]) -> None:
        for future, outcome in finished:
            assert isinstance(future, asyncio.Future)
            _settle(future, outcome)

    # ---- engine thread ----

    def _main(self, opened: asyncio.Future[None]) -> None:
        try:
            core = self._open()
        except SilvaError as error:
            self._post(_settle, opened, error)
            return
        except Exception as error:
            logger.exception("the torch engine could not start")
            self._post(_settle, opened, EngineFault(f"the torch engine could not load {self._hf_dir}: {error}"))
            return
        self._core = core
        self._post(_settle, opened, None)
        while self._turn(core):
            pass

    def _open(self) -> TorchCore:
        limit_threads(self._num_threads)
        decoder = Decoder(self._config, dtype=self._dtype, device=self._device)
        try:
            decoder.load(load_weights(self._hf_dir))
        except WeightsError as error:
            raise ConfigError(f"{self._hf_dir}: {error}") from error
        return self._new_core(decoder)

    def _turn(self, core: TorchCore) -> bool:
        """Take commands, run one step, hand out what ended. False ends the thread."""
        with self._wake:
            while not (self._commands or core.has_work or self._closing):
                self._wake.wait()
            commands, self._commands = self._commands, []
            if self._closing:
                return False
        for command in commands:
            self._guarded(core, command)
        if core.has_work:
            self._guarded(core, TorchCore.step)
        finished = core.take_finished()
        return self._post(self._deliver, finished) if finished else True

    def _guarded(self, core: TorchCore, action: Callable[[TorchCore], None]) -> None:
        """The thread must survive any fault: whoever waits receives it, later requests get a fresh cache."""
        try:
            action(core)
        except Exception as error:
            logger.exception("a step of the torch engine failed")
            message = f"a step of the torch engine failed: {type(error).__name__}: {error}"
            core.fail_all(message)
            self._post(self._fail_loads, message)

    def _post(self, callback: Callable[..., None], *args: object) -> bool:
        """Call back on the event loop. False when the loop is closed: nobody waits any more."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            logger.warning("the event loop of the torch engine is closed; its thread ends")
            return False
        return True


def _settle(future: asyncio.Future[_T], outcome: _T | BaseException) -> None:
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
