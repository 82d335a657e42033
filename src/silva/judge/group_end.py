"""How sessions and groups end once their agents did: the outcome of each session, and whether the group counts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from silva.credit import session_reward
from silva.data import Prompt
from silva.turns import Session
from silva.types import GroupEnd, GroupView, JsonObject, Mode, Samples, SessionFailure, SessionStatus, SharedPrefix

log = logging.getLogger("silva.rollout")

UNFIT = ("images_not_trainable", "several_contexts", "reward_invalid")
"""Reasons of sessions whose samples the settings of their group do not let be trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotFailure:
    """The last failure of a slot whose retries are used up."""

    session_id: str
    """The last session of the slot."""
    reason: str
    """The ledger's word."""
    message: str
    """What went wrong, for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupResult:
    """What became of one prompt."""

    prompt: Prompt
    """The row's use that was sampled."""
    group_id: str
    """The group, unique in the run."""
    samples: Samples
    """The exported contexts, session by session in the order of the slots."""
    failures: tuple[SlotFailure, ...]
    """The slots that yielded nothing."""
    end: GroupEnd | None = None
    """Why the group does not count; None for one that does."""


class RewardStage(Protocol):
    """Gives sessions their rewards once their agents ended. With `group_wise` a whole group is judged at once."""

    @property
    def group_wise(self) -> bool: ...

    async def judge_session(self, session: Session, samples: Samples) -> Samples:
        """The contexts of one session with their rewards. Raises SessionFailure."""
        ...

    async def judge_group(
        self, ended: Sequence[tuple[Session, Samples]], failed_slots: Mapping[int, str]
    ) -> list[Samples | SessionFailure]:
        """The same for all sessions of a group, one result each. `failed_slots`: reason by slot. Raises GroupEnd."""
        ...


class CreditStage(Protocol):
    """Gives the contexts of a training group their credits before the group counts."""

    async def assign(self, samples: Samples, group: GroupView) -> Samples:
        """All exported contexts of a group, in the order of its slots; the same contexts come back. Raises GroupEnd."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSettings:
    """How the groups of one mode run."""

    mode: Mode
    """Training or evaluation."""
    num_samples: int
    """Slots of a group."""
    min_size: int
    """A group counts if at least so many of its sessions are left."""
    num_retries: int
    """Further sessions that a slot gets after failures."""
    text_only: bool = False
    """The samples go where images cannot be trained."""
    one_context: str | None = None
    """Why a session may export only one context; None where it may export several."""
    one_reward: bool = False
    """The contexts of a session share one reward, from which credit is made."""
    shared_prefix: SharedPrefix = "once"
    """How often a turn that several contexts share is trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a session ended, before it is written."""

    status: SessionStatus
    """How the ledger counts it."""
    samples: Samples = ()
    """The exported contexts; none unless the session is exported."""
    reason: str | None = None
    """The ledger's word for a failure."""
    message: str | None = None
    """What went wrong, for people."""
    reward: float | None = None
    """The session's reward, None where it has none."""
    metadata: JsonObject = field(default_factory=dict[str, object])
    """What the agent wrote beside the reward."""
    retry: bool = True
    """Whether a failure leaves the slot another session."""

    @classmethod
    def exported(cls, samples: Samples) -> Outcome:
        """Reward and metadata of a session are those of the context that carries its reward, else the first's."""
        first = next((sample for sample in samples if sample.reward is not None), samples[0])
        return cls(status="exported", samples=samples, reward=first.reward, metadata=first.metadata)

    @classmethod
    def failed(cls, failure: SessionFailure, *, retry: bool = True) -> Outcome:
        return cls(status="failed", reason=failure.reason, message=str(failure), retry=retry)


@dataclass(kw_only=True, eq=False)
class SlotEnd:
    """The last session of a slot. Rewards and credit change `outcome` on its way through the end of its group."""

    slot: int
    """Place in the group."""
    session_id: str
    """The session that the slot came to in the end."""
    outcome: Outcome
    """How that session ended, so far."""
    session: Session | None = None
    """The session itself; None where only its samples are on record."""

    def failure(self) -> SlotFailure:
        """What the failure budget and the group's result keep of a slot that yields nothing."""
        outcome = self.outcome
        return SlotFailure(
            session_id=self.session_id, reason=outcome.reason or outcome.status, message=outcome.message or ""
        )


def checked(settings: GroupSettings, samples: Samples, *, judged: bool = True) -> Outcome:
    """The end of a session that exported `samples`: failed where the settings do not let them be trained.

    `judged`: their rewards are final. Another run of the agent would not help, so nothing here is retried.
    """
    try:
        if settings.text_only:
            _refuse_images(samples)
        if settings.one_context is not None and len(samples) > 1:
            what = f"session {samples[0].session_id} exported {len(samples)} contexts"
            raise SessionFailure("several_contexts", f"{what}; {settings.one_context}")
        if settings.one_reward and judged:
            session_reward(samples)
    except SessionFailure as failure:
        return Outcome.failed(failure, retry=False)
    return Outcome.exported(samples)


async def judge_session(settings: GroupSettings, rewards: RewardStage, session: Session, samples: Samples) -> Outcome:
    """The end of a session by itself; under group-wise rewards `judge_group` has the last word."""
    outcome = checked(settings, samples, judged=False)
    if outcome.status == "failed" or rewards.group_wise:
        return outcome
    try:
        samples = await rewards.judge_session(session, samples)
    except SessionFailure as failure:
        return Outcome.failed(failure, retry=False)
    return checked(settings, samples)


async def judge_group(settings: GroupSettings, rewards: RewardStage, ends: Sequence[SlotEnd]) -> GroupEnd | None:
    """Judge the exported sessions of a group as a whole, where rewards are given so. Returns why it does not count."""
    left = _left(ends)
    if not rewards.group_wise or not left:
        return None
    pairs = [(end.session, end.outcome.samples) for end in left if end.session is not None]
    try:
        verdicts = await rewards.judge_group(pairs, _failed_slots(ends))
    except GroupEnd as found:
        return found
    for end, verdict in zip(left, verdicts, strict=True):
        failed = isinstance(verdict, SessionFailure)
        end.outcome = Outcome.failed(verdict, retry=False) if failed else checked(settings, verdict)
    return None


async def close_group(
    settings: GroupSettings,
    ends: Sequence[SlotEnd],
    *,
    prompt: Prompt,
    group_id: str,
    credit: CreditStage | None,
    end: GroupEnd | None = None,
) -> GroupResult:
    """The end of a group whose sessions are judged: whether enough are left, then their credit, then the result.

    `ends` are the slots in order; a slot without a session counts as lost. `end`: why the group does not count, where
    that is known. Credit is given to training groups only, and before the group counts.
    """
    left = _left(ends)
    end = end or _too_few_left(len(left), settings)
    if end is None and credit is not None and settings.mode == "train":
        view = GroupView(
            group_id=group_id,
            row_metadata=prompt.input.metadata or {},
            label=prompt.label,
            slots=[one.slot for one in left],
            failed_slots=_failed_slots(ends),
        )
        try:
            credited = iter(await credit.assign(_samples(left), view))
            for one in left:
                one.outcome = replace(one.outcome, samples=tuple(next(credited) for _ in one.outcome.samples))
        except GroupEnd as found:
            end = found
    if end is not None:
        log.warning("group %s is %s (%s): %s", group_id, end.state, end.reason, end)
    failures = tuple(one.failure() for one in ends if one.outcome.status != "exported")
    return GroupResult(prompt=prompt, group_id=group_id, samples=_samples(left), failures=failures, end=end)


def _left(ends: Sequence[SlotEnd]) -> list[SlotEnd]:
    return [end for end in ends if end.outcome.status == "exported"]


def _samples(ends: Sequence[SlotEnd]) -> Samples:
    return tuple(sample for end in ends for sample in end.outcome.samples)


def _failed_slots(ends: Sequence[SlotEnd]) -> dict[int, str]:
    return {end.slot: end.outcome.reason or "" for end in ends if end.outcome.status != "exported"}


def _too_few_left(num_left: int, settings: GroupSettings) -> GroupEnd | None:
    if num_left >= settings.min_size:
        return None
    return GroupEnd(
        "group_too_small" if num_left else "all_sessions_failed",
        f"{num_left} of {settings.num_samples} sessions are left, and {settings.min_size} are needed "
        "(--agentic-min-group-size)",
    )


def _refuse_images(samples: Samples) -> None:
    for sample in samples:
        if sample.images:
            raise SessionFailure(
                "images_not_trainable",
                f"the context to train on holds {len(sample.images)} image(s), and the trainer of this version takes "
                "text only; use silva rollout to collect samples with images, or an agent that sends none",
            )
