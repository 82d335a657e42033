"""Credit of whole groups: statistics over the sessions of a prompt, then down to their contexts and turns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from silva.credit.grpo import standardised
from silva.credit.reward import REWARD_INVALID, check_reward
from silva.credit.shared import CreditShare, by_session, holders, spread_credits
from silva.credit.spread import CreditFunction, has_no_spread
from silva.types import SessionFailure, SharedPrefix, TrainingSample


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStats:
    """What credit from rewards sees in some groups."""

    num_groups: int
    """Groups with a usable reward."""
    num_sessions: int
    """Sessions with a usable reward."""
    zero_std: Mapping[float, int] = field(default_factory=dict[float, int])
    """Groups whose sessions cannot be distinguished (all rewards equal, or one session only), by their reward."""
    rejected: Mapping[str, SessionFailure] = field(default_factory=dict[str, SessionFailure])
    """By session id, the failure of each session whose reward cannot be used."""

    @classmethod
    def of(cls, samples: Iterable[TrainingSample]) -> GroupStats:
        """Of the rewards of these samples, whose groups are found by `group_id`."""
        groups, rejected = _rewards_by_group(samples)
        zero_std = Counter(min(rewards.values()) for rewards in groups.values() if has_no_spread([*rewards.values()]))
        return cls(
            num_groups=len(groups), num_sessions=sum(map(len, groups.values())), zero_std=zero_std, rejected=rejected
        )

    def metrics(self) -> dict[str, float]:
        """Counts of groups under `rollout/zero_std/count_<reward>`, in the order of the rewards."""
        merged: Counter[str] = Counter()
        for reward, count in sorted(self.zero_std.items()):
            merged[f"rollout/zero_std/count_{reward:g}"] += count
        return {name: float(count) for name, count in merged.items()}


def assign_group_credit(
    samples: Iterable[TrainingSample],
    *,
    credit_of: CreditFunction = standardised,
    share: CreditShare = "shared",
    shared_prefix: SharedPrefix = "once",
) -> tuple[list[TrainingSample], GroupStats]:
    """The samples with their credit set, in the order given, and what was seen on the way.

    Groups are found by `group_id`, and `credit_of` sees one reward per session, so neither the order of the samples nor
    the number of samples of a session matters. `share` says what each context gets of its session's credit, and
    `spread_credits` what that makes of turns that several contexts hold. Samples of a session without a usable reward
    (see `session_reward`) are left out of the result; their session is in `GroupStats.rejected`.
    """
    samples = list(samples)
    credit: dict[str, float] = {}
    for rewards in _rewards_by_group(samples)[0].values():
        credit.update(zip(rewards, credit_of([*rewards.values()]), strict=True))
    used = [sample for sample in samples if sample.session_id in credit]
    parts = [1.0] * len(used) if share == "shared" else token_shares(used)
    credits = [credit[sample.session_id] * part for sample, part in zip(used, parts, strict=True)]
    return list(spread_credits(used, credits, shared_prefix=shared_prefix)), GroupStats.of(samples)


def token_shares(samples: Sequence[TrainingSample]) -> list[float]:
    """What share of its session's sampled tokens each context has; those of a session add up to 1.

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


def _rewards_by_group(
    samples: Iterable[TrainingSample],
) -> tuple[dict[str, dict[str, float]], dict[str, SessionFailure]]:
    """By group, the reward of each usable session; and the failure of each other session."""
    groups: dict[str, dict[str, float]] = {}
    rejected: dict[str, SessionFailure] = {}
    for contexts in by_session(samples):
        session_id, (group_id, *others) = contexts[0].session_id, {sample.group_id for sample in contexts}
        assert not others, f"{session_id} is in two groups"
        try:
            reward = session_reward(contexts)
        except SessionFailure as failure:
            rejected[session_id] = failure
        else:
            groups.setdefault(group_id, {})[session_id] = reward
    return groups, rejected
