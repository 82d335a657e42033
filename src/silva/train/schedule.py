"""The learning rate over a run, by how many rollout steps are done."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from silva.train.options import ScheduleKind
from silva.types import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A linear warm-up to the full rate, then that rate for good, or half a cosine down to `floor`.

    Example: `Schedule(kind="cosine", warmup=10, total=100, floor=0.1).scale(55)` is about 0.55
    """

    kind: ScheduleKind = "constant"
    """What follows the warm-up."""
    warmup: int = 0
    """Rollout steps of the warm-up."""
    total: int | None = None
    """Rollout steps of the whole run; only the cosine needs it."""
    floor: float = 0.0
    """The lowest rate of the cosine, as a share of the full rate."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScheduleKind):
            raise ConfigError(f"lr_schedule is {self.kind!r}; choose one of {', '.join(get_args(ScheduleKind))}")
        if self.warmup < 0:
            raise ConfigError(f"warmup is {self.warmup} rollout steps; it must be at least 0")
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"the lowest learning rate is {self.floor:g} of the full one; it must be 0 to 1 of it")
        if self.kind == "cosine" and (self.total is None or self.total <= self.warmup):
            raise ConfigError(
                f"lr_schedule cosine over {self.total} rollout steps with {self.warmup} of warm-up leaves none to fall"
            )

    def scale(self, rollout_id: int, step: int = 0, num_steps: int = 1) -> float:
        """The share of the full rate in optimizer step `step` of `num_steps` of rollout step `rollout_id` (all from 0).

        The first step of the warm-up has 1 / (warmup * num_steps), the last has 1. The cosine starts after it at 1 and
        would reach `floor` where the run is over.
        """
        done = rollout_id + step / num_steps
        if done < self.warmup:
            return min(1.0, (done + 1 / num_steps) / self.warmup)
        if self.kind == "constant":
            return 1.0
        assert self.total is not None
        share = min(1.0, (done - self.warmup) / (self.total - self.warmup))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * share)) / 2
