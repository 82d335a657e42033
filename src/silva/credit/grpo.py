"""Group-relative credit: how much better a session did than the other sessions of its prompt.

The formula is that of GRPO (Shao et al. 2024, "DeepSeekMath", outcome supervision); without the division by the
standard deviation it is that of Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from silva.credit.reward import REWARD_INVALID, check_reward
from silva.types.errors import SessionFailure
from silva.types.rollout import TrainingSample

STD_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStats:
    """What the assignment of credit saw.

    `zero_std` counts the groups that teach nothing (all rewards equal, or one session only) by their reward value.
    `rejected` holds, by session id, the failure of each session whose reward could not be used.
    """

    num_groups: int
    num_sessions: int
    zero_std: Mapping[float, int] = field(default_factory=dict[float, int])
    rejected: Mapping[str, SessionFailure] = field(default_factory=dict[str, SessionFailure])

    def metrics(self) -> dict[str, float]:
        """Counts of groups under `rollout/zero_std/count_<reward>`, in the order of the rewards."""
        merged: Counter[str] = Counter()
        for reward, count in sorted(self.zero_std.items()):
            merged[f"rollout/zero_std/count_{reward:g}"] += count
        return {name: float(count) for name, count in merged.items()}


def group_advantages(rewards_G: Sequence[float], *, std_normalization: bool = True) -> list[float]:
    """One advantage a session: `(r - mean) / (std + 1e-6)` with the unbiased std, in float64.

    `std_normalization=False` leaves out the division. Exactly 0.0 for all where `has_no_spread(rewards_G)`.
    The rewards must have passed `check_reward`.
    """
    if has_no_spread(rewards_G):
        return [0.0] * len(rewards_G)
    num = len(rewards_G)
    mean = math.fsum(rewards_G) / num
    centred_G = [reward - mean for reward in rewards_G]
    if not std_normalization:
        return centred_G
    std = math.sqrt(math.fsum(c * c for c in centred_G) / (num - 1))
    return [c / (std + STD_EPSILON) for c in centred_G]


def has_no_spread(rewards_G: Sequence[float]) -> bool:
    """True for a group of one, and where all rewards are equal up to the rounding of a few float64 operations."""
    if len(rewards_G) < 2:
        return True
    low, high = min(rewards_G), max(rewards_G)
    # 0.1 + 0.2 and 0.3 are the same reward: without this, their difference of one ulp would be divided by itself
    return high - low <= 4 * math.ulp(max(abs(low), abs(high)))


def assign_group_credit(
    samples: Iterable[TrainingSample], *, std_normalization: bool = True
) -> tuple[list[TrainingSample], GroupStats]:
    """The samples with their credit set, in the order given, and what was seen on the way.

    Groups are found by `group_id` and their statistics are taken over sessions, so neither the order of the samples
    nor the number of samples of a session matters; all samples of one session get the same credit. Samples of a session
    whose reward is missing, invalid or not the same in all its samples are left out of the result and of the
    statistics, and their session stands in `GroupStats.rejected`.
    """
    samples = list(samples)
    rewards, rejected = _session_rewards(samples)
    sessions_by_group: dict[str, list[str]] = {}
    for sample in samples:
        if sample.session_id in rewards:
            members = sessions_by_group.setdefault(sample.group_id, [])
            if sample.session_id not in members:
                members.append(sample.session_id)

    credit: dict[str, float] = {}
    zero_std: Counter[float] = Counter()
    for members in sessions_by_group.values():
        rewards_G = [rewards[session_id] for session_id in members]
        if has_no_spread(rewards_G):
            zero_std[min(rewards_G)] += 1
        credit.update(zip(members, group_advantages(rewards_G, std_normalization=std_normalization), strict=True))

    credited = [replace(s, credit=credit[s.session_id]) for s in samples if s.session_id in credit]
    stats = GroupStats(
        num_groups=len(sessions_by_group), num_sessions=len(rewards), zero_std=dict(zero_std), rejected=rejected
    )
    return credited, stats


def _session_rewards(samples: Sequence[TrainingSample]) -> tuple[dict[str, float], dict[str, SessionFailure]]:
    """The reward of each usable session, and the failure of each other one."""
    rewards: dict[str, float] = {}
    groups: dict[str, str] = {}
    rejected: dict[str, SessionFailure] = {}
    for sample in samples:
        session_id = sample.session_id
        assert groups.setdefault(session_id, sample.group_id) == sample.group_id, f"{session_id} is in two groups"
        where = f"session {session_id}" + (f", context {sample.name}" if sample.name is not None else "")
        try:
            reward = check_reward(sample.reward, where)
        except SessionFailure as failure:
            rejected.setdefault(session_id, failure)
            continue
        if rewards.setdefault(session_id, reward) != reward:
            message = (
                f"session {session_id} exported samples with the rewards {rewards[session_id]!r} and {reward!r} "
                f"({where}): group-relative credit needs one reward a session"
            )
            rejected.setdefault(session_id, SessionFailure(REWARD_INVALID, message))
    return {session_id: r for session_id, r in rewards.items() if session_id not in rejected}, rejected
