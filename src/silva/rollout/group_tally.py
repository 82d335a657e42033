"""What the groups of a rollout step came to, slot by slot: the denominators of its rates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from silva.credit import by_session
from silva.judge import GroupResult
from silva.types import TrainingSample

PASSED = 1.0
"""The primary reward of a session that did its task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTally:
    """The slots of one group. A session counts in the pass rate if exactly one of its contexts has a reward."""

    num_sessions: int
    """Slots that yielded a session."""
    num_failed: int
    """Slots that yielded none."""
    rewards: tuple[float, ...]
    """The reward of each session that has one."""
    num_passed: int
    """Sessions that passed."""
    num_ambiguous: int
    """Sessions with rewards in several contexts."""
    num_unrewarded: int
    """Sessions without a reward."""
    state: str | None = None
    """Why the group does not count: dropped or filtered; None for one that counts."""

    @property
    def num_slots(self) -> int:
        return self.num_sessions + self.num_failed

    @property
    def num_judged(self) -> int:
        """Slots in the pass rate: a failed one is there, as not passed."""
        return self.num_slots - self.num_ambiguous - self.num_unrewarded


@dataclass(frozen=True, kw_only=True, slots=True)
class StepGroups:
    """The groups of a rollout step."""

    groups: list[GroupResult]
    """Those that count."""
    ended: list[GroupTally] = field(default_factory=list[GroupTally])
    """The slots of those that do not."""

    @property
    def tallies(self) -> list[GroupTally]:
        return [*map(tally, self.groups), *self.ended]


def first_reward(contexts: Iterable[TrainingSample]) -> float | None:
    """The reward of the first context that carries one."""
    return next((sample.reward for sample in contexts if sample.reward is not None), None)


def tally(result: GroupResult) -> GroupTally:
    """Count the slots of a group that ended, whether it counts or not."""
    sessions = by_session(result.samples)
    carried = [[sample.reward for sample in contexts if sample.reward is not None] for contexts in sessions]
    return GroupTally(
        num_sessions=len(sessions),
        num_failed=len(result.failures),
        rewards=tuple(rewards[0] for rewards in carried if rewards),
        num_passed=sum(rewards == [PASSED] for rewards in carried),
        num_ambiguous=sum(len(rewards) > 1 for rewards in carried),
        num_unrewarded=sum(not rewards for rewards in carried),
        state=None if result.end is None else result.end.state,
    )
