"""The line between a run and whatever trains: samples in, weight versions out. No torch.

    backend.train_rollout(samples, ...)   version 3 -> 4
    backend.publish()                     a copy of version 4, for the engines
    backend.save(folder, ...)             a checkpoint that goes on at version 4

`Learner` is the backend in this process. A worker elsewhere implements the same protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from silva.train.checkpoint import CheckpointState
from silva.train.step_result import StepResult
from silva.types import TrainingSample, WeightSource

if TYPE_CHECKING:  # the arrays need NumPy, which reading options does not
    from silva.train.signals import PerSample


class TrainBackend(Protocol):
    """Owns the weights in training. Calls follow each other; none blocks the event loop."""

    @property
    def version(self) -> int:
        """The weight version in training: how often these weights were updated since the start model.

        A counter of its own, kept in checkpoints: it says nothing about the number of a rollout step.
        """
        ...

    async def logprobs(self, samples: Sequence[TrainingSample]) -> PerSample:
        """Log-probs under the weights in training, one array [T] per sample, 0.0 where the mask is 0."""
        ...

    def leave_out_too_long(self, samples: Sequence[TrainingSample]) -> tuple[list[TrainingSample], int]:
        """The samples that can be trained, and how many are too long. Call it before anything counts sessions."""
        ...

    async def train_rollout(
        self, samples: Sequence[TrainingSample], *, rollout_step: int, num_steps: int = 1
    ) -> list[StepResult]:
        """One update: `num_steps` optimizer steps on all samples, which have their credit. Adds 1 to `version`.

        `rollout_step` decides the learning rate of the schedule.
        """
        ...

    async def publish(self) -> WeightSource:
        """The weights in training under their version. Later updates do not change what was published."""
        ...

    async def save(self, folder: Path, *, step: int, extra: dict[str, object]) -> None:
        """Write a whole checkpoint of all that learns. `extra` (JSON values) comes back from `load`."""
        ...

    async def load(self, folder: Path) -> CheckpointState:
        """Continue from a checkpoint, at its version. Raises ConfigError or SilvaError for one that does not fit."""
        ...

    async def save_hf(self, folder: Path) -> None:
        """Write the weights alone as a Hugging Face model directory."""
        ...
