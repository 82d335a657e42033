"""Which groups start and which make a step: decisions without I/O, from counts alone.

    prompts --may_start--> pool (running groups) --> buffer (groups that count) --may_take--> a step
                 ^               |                           |
                 +---------------+------- StepProgress ----------+

A policy sees a StepProgress and answers; it owns nothing and remembers nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from silva.judge import GroupResult

MAX_FILTERED_BATCHES = 16
"""If a filter takes out this many batches of groups and leaves none between them, it takes out everything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProgress:
    """Where the run is.

    Example: a step of 4 groups with 3 started, of which 1 counts, 1 was dropped and 1 has its agents still:
    `StepProgress(num_started=3, num_running=1, num_resident=1, held=(group,), num_dropped=1)`.
    """

    num_started: int = 0
    """Groups that were started for the step that is being filled."""
    num_running: int = 0
    """Groups that have not ended: their agents run, or they are being judged."""
    num_resident: int = 0
    """Those of them that still have an agent."""
    held: Sequence[GroupResult] = ()
    """Groups that count and belong to no step yet, in the order in which they ended."""
    num_dropped: int = 0
    """Groups of this step that ended as dropped."""
    num_filtered: int = 0
    """Groups of this step that a filter took out."""
    prompts_left: bool = True
    """False once the prompts are over."""


class Policy(Protocol):
    """Decides when groups start and when they are trained."""

    @property
    def batch_size(self) -> int:
        """Groups of a whole step."""
        ...

    def may_start(self, now: StepProgress) -> int:
        """How many groups to start now, at least 0."""
        ...

    def may_take(self, now: StepProgress) -> list[GroupResult] | None:
        """The held groups that make this step, in order; None to wait for more. None left at all ends the run."""
        ...

    def must_stop(self, now: StepProgress) -> bool:
        """Whether it is hopeless to go on with this step."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncPolicy:
    """Rollout waits for training, so that staleness is 0: a step starts its groups, and takes them when all ended."""

    batch_size: int
    """Groups that make a step."""
    concurrency: int
    """Groups that may have agents at the same time."""
    replace: bool
    """A group that does not count is replaced by another one."""
    stop_if_all_fail: bool = True
    """A step without a group that counts ends the run."""

    def may_start(self, now: StepProgress) -> int:
        if not now.prompts_left:
            return 0
        filled = len(now.held) + now.num_running if self.replace else now.num_started
        return max(0, min(self.batch_size - filled, self.concurrency - now.num_resident))

    def may_take(self, now: StepProgress) -> list[GroupResult] | None:
        if now.num_running or self.may_start(now):
            return None
        return sorted(now.held, key=lambda group: group.prompt.position)

    def must_stop(self, now: StepProgress) -> bool:
        if now.held or not self.stop_if_all_fail:
            return False
        over = not now.num_running and not self.may_start(now) and now.num_started > 0
        size = self.batch_size
        return over or now.num_dropped >= size or now.num_filtered >= MAX_FILTERED_BATCHES * size
