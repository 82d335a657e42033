"""Importance weights by a user function, in place of the band of TIS."""

from __future__ import annotations

import asyncio
import logging
import reprlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from silva.train.packing import trainable_masks
from silva.train.signals import Masks, PerSample, TokenWeights
from silva.types import RunStopped, SilvaError, TrainingSample

log = logging.getLogger("silva.train")

TIS_PARAMS = ("args", "old_logprobs", "rollout_logprobs")
"""The function's parameters, as an error names them."""
MAX_WEIGHT = 1e9
"""Above every ratio (their logs are clamped to 20), and far enough below the largest float32."""
_AT_ONCE = 64


class _WrongWeights(SilvaError):
    """The function returned something that is not weights; the text says why."""


@dataclass(frozen=True, slots=True)
class CustomTis:
    """Calls a user function once per sequence (a context), with its trainable tokens alone.

    A sequence without usable weights has weight 0 throughout and is named in the log; if that happens to all sequences
    of a step, RunStopped is raised. Other errors than `failed` pass.
    """

    function: Callable[[object, list[float], list[float]], Awaitable[object]]
    """The user function, called with `options`, log-probs of the old policy and recorded log-probs."""
    options: object
    """What the function gets as `args`."""
    failed: type[SilvaError]
    """The error of a function that gave no value."""
    path: str
    """The function's name in errors."""
    _places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE), init=False)

    async def __call__(self, samples: Sequence[TrainingSample], old: PerSample, masks: Masks) -> TokenWeights:
        """Weights from the log-probs `old` under the old policy, one array [T] per sample."""
        weights = [np.zeros(len(sample.token_ids)) for sample in samples]
        masks_T = trainable_masks(samples, masks)
        asked = [i for i, mask_T in enumerate(masks_T) if mask_T.any()]
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(self._weigh(old[i][masks_T[i]], np.asarray(samples[i].logprobs)[masks_T[i]]))
                for i in asked
            ]
        made = {i: call.result() for i, call in zip(asked, calls, strict=True)}
        problems = {i: result for i, result in made.items() if isinstance(result, SilvaError)}
        if problems and len(problems) == len(asked):
            raise RunStopped(
                f"--custom-tis-function-path gave no weights for any of the {len(asked)} sequences of this step; the "
                f"first: {problems[asked[0]]}"
            )
        for i, result in made.items():
            if isinstance(result, SilvaError):
                log.warning("%s: its policy loss is left out, since it has no weights: %s", samples[i].place, result)
            else:
                weights[i][masks_T[i]] = result
        return TokenWeights(weights=weights, num_failed=len(problems))

    async def _weigh(
        self, old_N: NDArray[np.floating], rollout_N: NDArray[np.floating]
    ) -> NDArray[np.float64] | SilvaError:
        """The weights of one sequence, or why there are none."""
        async with self._places:
            try:
                value = await self.function(self.options, old_N.tolist(), rollout_N.tolist())
            except self.failed as error:
                return error
        try:
            return read_weights(value, len(old_N))
        except _WrongWeights as error:
            return _WrongWeights(f"{self.path} {error}")


def read_weights(value: object, num_tokens: int) -> NDArray[np.float64]:
    """One finite number from 0 to 1e9 for each trainable token. Raises SilvaError that says what is wrong."""
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
