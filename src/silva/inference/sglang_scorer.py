"""A model behind HTTP that scores what another one sampled: a server that speaks SGLang's native API."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from silva.inference.sglang_http import READY_WAIT_S, Once, Refused, SglangHttp, context_len
from silva.inference.sglang_scores_wire import OtherTokenizer, encode_score_request, read_scores, read_texts
from silva.inference.time_limit import RETRY_DELAYS_S, answer_in_time
from silva.model import Unscored, tell_unscored
from silva.types import Clock, ConfigError, EngineFault, RunStopped, TrainingSample

log = logging.getLogger("silva.engine")

FLAG = "--opd-teacher"
MAX_RUNNING = 32
_PASSING = (408, 429)
"""Statuses below 500 that another try may not meet."""


class SglangScorer:
    """Scores samples over `POST /generate` of one server, which samples nothing.

    Log-probs are those at temperature 1, whatever the server's defaults are. A failed call is retried after each of
    `retry_delays_s`; one that the server refuses (status 400 and the like) is not. At most `max_running` calls are in
    flight. `probe` maps ids to the texts that the policy's tokenizer gives them.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Clock,
        timeout_s: float,
        probe: Mapping[int, str],
        fallback_context_len: int,
        ready_wait_s: float = READY_WAIT_S,
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
        max_running: int = MAX_RUNNING,
    ):
        self._url = url.rstrip("/")
        self._clock = clock
        self._timeout_s = timeout_s
        self._probe = probe
        self._fallback_context_len = fallback_context_len
        self._retry_delays_s = tuple(retry_delays_s)
        self._max_running = max_running
        self._http = SglangHttp(clock=clock, flag=FLAG, ready_wait_s=min(ready_wait_s, timeout_s))
        self._nonce = uuid.uuid4().hex[:8]
        self._num_calls = 0
        self.max_context_len = 0
        self.model = ""
        """The server's name for its model."""

    async def start(self) -> None:
        """Wait until the server answers. Raises ConfigError: it does not, or it cannot score ids of this tokenizer."""
        self._http.open()
        try:
            model, server = await self._http.look(self._url)
            self.model = str(model.get("model_path"))
            if model.get("is_generation") is False:
                raise ConfigError(f"{FLAG} {self._url} serves {self.model}, which is no language model")
            self.max_context_len = context_len(server, self._fallback_context_len)
            await self._check_tokenizer()
        except BaseException:
            await self._http.close()
            raise
        log.info("%s: %s serves %s, context %d tokens", FLAG, self._url, self.model, self.max_context_len)

    async def close(self) -> None:
        await self._http.close()

    async def score(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float64]]:
        """Log-probs of the tokens from the first trainable one on, one array [T] per sample.

        NaN all over a sample that could not be scored, 0 all over one without a trainable token. Raises RunStopped
        where no sample could be, or where the server reads the ids as other tokens.
        """
        out = [np.zeros(len(sample.token_ids)) for sample in samples]
        asked = [i for i, sample in enumerate(samples) if any(sample.loss_mask)]
        room = asyncio.Semaphore(self._max_running)
        faults = await asyncio.gather(*(self._score_one(samples[i], out[i], room) for i in asked))
        unscored = [Unscored(sample=samples[i], reason=str(f)) for i, f in zip(asked, faults, strict=True) if f]
        other = next((fault for fault in faults if isinstance(fault, OtherTokenizer)), None)
        if other is not None:
            raise RunStopped(f"{FLAG} {self._url}: {other}; its tokenizer is not that of --hf-checkpoint")
        tell_unscored(f"the teacher {self._url}", unscored, len(asked))
        return out

    async def _score_one(
        self, sample: TrainingSample, out_T: NDArray[np.float64], room: asyncio.Semaphore
    ) -> EngineFault | None:
        """Fill in the scores of a sample, or NaN; returns what went wrong."""
        ids, start = sample.token_ids, sample.loss_mask.index(1) - 1
        try:
            if len(ids) > self.max_context_len:
                raise EngineFault(f"it has {len(ids)} tokens, the server takes {self.max_context_len}")
            async with room:
                out_T[start + 1 :] = await self._ask(ids, start)
        except EngineFault as fault:
            out_T[:] = np.nan
            return fault
        return None

    async def _ask(self, ids: Sequence[int], start: int) -> list[float]:
        for delay_s in (*self._retry_delays_s, None):
            try:
                rid, body = await self._call(ids, start)
                return read_scores(ids, start, rid, body)
            except OtherTokenizer:
                raise
            except EngineFault as fault:
                if delay_s is None or _is_final(fault):
                    raise
                log.debug("the teacher is asked again: %s", fault)
            await self._clock.sleep(delay_s)
        raise AssertionError("the last try returns or raises")

    async def _call(self, ids: Sequence[int], start: int, *, with_texts: bool = False) -> tuple[str, bytes]:
        """The name of a call, and the body of its answer."""
        self._num_calls += 1
        rid = f"{self._nonce}-score-{self._num_calls:012x}"
        body = Once(encode_score_request(ids, start, rid, with_texts=with_texts))
        async with answer_in_time(self._clock, self._timeout_s, self._url):
            return rid, await self._http.call("POST", self._url, "/generate", body)

    async def _check_tokenizer(self) -> None:
        """A server does not report its tokenizer, but it shows the texts of ids."""
        ids = list(self._probe)
        where = f"{FLAG} {self._url} (model {self.model})"
        if not ids:
            log.warning("%s: no id of the tokenizer is a plain word, so nothing shows that it is the same", where)
            return
        try:
            rid, body = await self._call(ids, 0, with_texts=True)
            texts = read_texts(ids, rid, body)
        except EngineFault as fault:
            raise ConfigError(f"{where} cannot score ids of the tokenizer of --hf-checkpoint: {fault}") from fault
        for token, text in zip(ids, texts, strict=True):
            if text is not None and text.strip() != self._probe[token].strip():
                raise ConfigError(
                    f"{where} has another tokenizer than --hf-checkpoint: it reads id {token} as {text!r}, not as "
                    f"{self._probe[token]!r}. Take a teacher with the same tokenizer"
                )
        if None in texts:
            log.warning("%s does not say what it reads ids as; nothing shows that its tokenizer is the same", where)


def _is_final(fault: EngineFault) -> bool:
    """Another try would end the same way."""
    return isinstance(fault, Refused) and fault.status < 500 and fault.status not in _PASSING
