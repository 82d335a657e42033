"""Importance weights by a function of the user, in place of the band of TIS."""

from __future__ import annotations

import asyncio
import logging
import reprlib
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from silva.train.packing import trainable_masks
from silva.train.signals import Masks, PerSample, TokenWeights
from silva.types.errors import RunStopped, SilvaError
from silva.types.rollout import TrainingSample

log = logging.getLogger("silva.train")

TIS_PARAMS = ("args", "old_logprobs", "rollout_logprobs")
"""What the function is given, by the names that an error tells."""
MAX_WEIGHT = 1e9
"""Above every ratio (their logs are clamped to 20), and far enough below what float32 holds."""
_AT_ONCE = 64


class _WrongWeights(SilvaError):
    """What the function returned are no weights; the text says why."""


class CustomTis:
    """Asks a function of the user once a sequence (a context), with its trainable tokens alone.

    `failed` are the errors by which the function tells that it gave no value. A sequence without usable weights has
    weight 0 throughout and is named in the log; where that befalls all of a step, RunStopped. Other errors pass.
    """

    def __init__(
        self,
        function: Callable[[object, list[float], list[float]], Awaitable[object]],
        *,
        options: object,
        failed: type[SilvaError],
        path: str,
    ):
        """`options` is what the function gets as `args`; `path` is named in errors."""
        self._function = function
        self._options = options
        self._failed = failed
        self._path = path
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def __call__(self, samples: Sequence[TrainingSample], old: PerSample, masks: Masks) -> TokenWeights:
        """Weights from the log-probs `old` under the old policy, one array a sample."""
        weights = [np.zeros(len(sample.token_ids)) for sample in samples]
        masks_T = trainable_masks(samples, masks)
        asked = [i for i, mask_T in enumerate(masks_T) if mask_T.any()]
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(self._weigh(old[i][masks_T[i]], np.asarray(samples[i].logprobs)[masks_T[i]]))
                for i in asked
            ]
        problems: list[SilvaError] = []
        for i, call in zip(asked, calls, strict=True):
            made = call.result()
            if isinstance(made, SilvaError):
                problems.append(made)
                log.warning("%s: its policy loss is left out, since it has no weights: %s", samples[i].place, made)
            else:
                weights[i][masks_T[i]] = made
        if problems and len(problems) == len(asked):
            raise RunStopped(
                f"--custom-tis-function-path gave no weights for any of the {len(asked)} sequences of this step; the "
                f"first: {problems[0]}"
            )
        return TokenWeights(weights=weights, num_failed=len(problems))

    async def _weigh(
        self, old_N: NDArray[np.floating], rollout_N: NDArray[np.floating]
    ) -> NDArray[np.float64] | SilvaError:
        """The weights of one sequence, or why there are none."""
        async with self._places:
            try:
                value = await self._function(self._options, old_N.tolist(), rollout_N.tolist())
            except self._failed as error:
                return error
        try:
            return read_weights(value, len(old_N))
        except _WrongWeights as error:
            return _WrongWeights(f"{self._path} {error}")


def read_weights(value: object, num_tokens: int) -> NDArray[np.float64]:
    """One finite number from 0 to 1e9 a trainable token. Raises SilvaError that says what is wrong."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _WrongWeights(f"returned {reprlib.repr(value)}; it must be a list of {num_tokens} numbers")
    if len(value) != num_tokens:
        raise _WrongWeights(f"returned {len(value)} weights for a sequence of {num_tokens} trainable tokens")
    for place, weight in enumerate(value):
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MAX_WEIGHT:
            raise _WrongWeights(
                f"returned {reprlib.repr(weight)} for token {place}; a weight is a number from 0 to {MAX_WEIGHT:g}"
            )
    return np.asarray(value, dtype=np.float64)
