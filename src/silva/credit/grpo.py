"""Group-relative credit: how much better a session did than the other sessions of its prompt.

The formula is that of GRPO (Shao et al. 2024, "DeepSeekMath", outcome supervision); without the division by the
standard deviation it is that of Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from silva.credit.reward import REWARD_INVALID, check_reward
from silva.credit.shared import by_session, holders, spread_credits
from silva.state.lineage import SharedPrefix
from silva.types.errors import SessionFailure
from silva.types.rollout import TrainingSample

STD_EPSILON = 1e-6

CreditShare = Literal["shared", "split"]
"""What each context gets of its session's credit: all of it, or its share of the session's sampled tokens."""


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

    @classmethod
    def of(cls, samples: Iterable[TrainingSample]) -> GroupStats:
        """Of samples that came with their credit: no reward was looked at."""
        group_of = {sample.session_id: sample.group_id for sample in samples}
        return cls(num_groups=len(set(group_of.values())), num_sessions=len(group_of))

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
    samples: Iterable[TrainingSample],
    *,
    std_normalization: bool = True,
    share: CreditShare = "shared",
    shared_prefix: SharedPrefix = "once",
) -> tuple[list[TrainingSample], GroupStats]:
    """The samples with their credit set, in the order given, and what was seen on the way.

    Groups are found by `group_id` and their statistics are taken over sessions, so neither the order of the samples
    nor the number of samples of a session matters. `share` says what each context gets of its session's credit, and
    `spread_credits` what that makes of turns that several contexts hold. Samples of a session without a usable reward
    (see `session_reward`) are left out of the result and of the statistics, and their session stands in
    `GroupStats.rejected`.
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

    used = [sample for sample in samples if sample.session_id in credit]
    parts = [1.0] * len(used) if share == "shared" else token_shares(used)
    credits = [credit[sample.session_id] * part for sample, part in zip(used, parts, strict=True)]
    stats = GroupStats(
        num_groups=len(sessions_by_group), num_sessions=len(rewards), zero_std=dict(zero_std), rejected=rejected
    )
    return list(spread_credits(used, credits, shared_prefix=shared_prefix)), stats


def token_shares(samples: Sequence[TrainingSample]) -> list[float]:
    """What share of its session's sampled tokens each context holds; those of a session add up to 1.

    A turn that several contexts hold counts for each of them by its fraction, so that the order of the contexts does
    not matter.
    """
    count = holders(samples)
    tokens = [
        math.fsum(span.length / count[sample.session_id, span.node_id] for span in sample.responses)
        for sample in samples
    ]
    whole: dict[str, list[float]] = {}
    for sample, num in zip(samples, tokens, strict=True):
        whole.setdefault(sample.session_id, []).append(num)
    return [num / math.fsum(whole[sample.session_id]) for sample, num in zip(samples, tokens, strict=True)]


def session_reward(samples: Sequence[TrainingSample]) -> float:
    """The one reward of a session, which may stand in one of its contexts or, the same, in several.

    Raises SessionFailure(reason="reward_invalid") where none has a reward, one is no number to train on, or two differ.
    """
    given = [sample for sample in samples if sample.reward is not None] or list(samples[:1])
    first = check_reward(given[0].reward, given[0].place)
    for sample in given[1:]:
        reward = check_reward(sample.reward, sample.place)
        if reward != first:
            raise SessionFailure(
                REWARD_INVALID,
                f"{given[0].place} has the reward {first!r} and {sample.place} {reward!r}: group-relative credit "
                "needs one reward a session. Write it into one of its contexts, or let "
                "--agentic-custom-advantage-path give each context its own credit",
            )
    return first


def _session_rewards(samples: Sequence[TrainingSample]) -> tuple[dict[str, float], dict[str, SessionFailure]]:
    """The reward of each usable session, and the failure of each other one."""
    rewards: dict[str, float] = {}
    rejected: dict[str, SessionFailure] = {}
    for contexts in by_session(samples):
        session_id = contexts[0].session_id
        assert len({sample.group_id for sample in contexts}) == 1, f"{session_id} is in two groups"
        try:
            rewards[session_id] = session_reward(contexts)
        except SessionFailure as failure:
            rejected[session_id] = failure
    return rewards, rejected
