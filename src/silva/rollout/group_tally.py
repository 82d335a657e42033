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
    """The slots of one group: `num_failed` yielded no session, each other one is a session.

    `rewards` has one entry for each session with a reward. A session counts in the pass rate if exactly one of its
    contexts carries a reward: `num_ambiguous` have several, `num_unrewarded` none. `state` is the end of the group's
    prompt where it does not count (dropped, filtered), else None.
    """

    num_sessions: int
    num_failed: int
    rewards: tuple[float, ...]
    num_passed: int
    num_ambiguous: int
    num_unrewarded: int
    state: str | None = None

    @property
    def num_slots(self) -> int:
        return self.num_sessions + self.num_failed

    @property
    def num_judged(self) -> int:
        """Slots in the pass rate: a failed one is there, as not passed."""
        return self.num_slots - self.num_ambiguous - self.num_unrewarded


@dataclass(frozen=True, kw_only=True, slots=True)
class StepGroups:
    """The groups of a rollout step: those that count, and what the others came to."""

    groups: list[GroupResult]
    ended: list[GroupTally] = field(default_factory=list[GroupTally])

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
