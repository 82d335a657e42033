"""How sessions and groups end once their agents did: the outcome of each session, and whether the group counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from silva.credit.assign import session_reward
from silva.data.prompts import Prompt
from silva.forest.lineage import SharedPrefix
from silva.turns.session import Session
from silva.types.errors import GroupEnd, SessionFailure
from silva.types.messages import JsonObject
from silva.types.rollout import Mode, Samples, SessionStatus, TrainingSample


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotFailure:
    """The last failure of a slot whose retries are used up."""

    session_id: str
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupResult:
    """What became of one prompt. `end` tells why the group does not count, None for one that does.

    `samples` are the exported contexts, session by session in the order of the slots.
    """

    prompt: Prompt
    group_id: str
    samples: Samples
    failures: tuple[SlotFailure, ...]
    end: GroupEnd | None = None


class RewardStage(Protocol):
    """Gives sessions their rewards once their agents ended. With `group_wise` a whole group is judged at once."""

    @property
    def group_wise(self) -> bool: ...

    async def judge_session(self, session: Session, samples: Samples) -> Samples:
        """The contexts of one session with their rewards. Raises SessionFailure."""
        ...

    async def judge_group(self, ended: Sequence[tuple[Session, Samples]]) -> list[Samples | SessionFailure]:
        """The same for all sessions of a group, one result each. Raises GroupEnd."""
        ...


class CreditStage(Protocol):
    """Gives the contexts of a group their credits before the group counts."""

    async def assign(self, samples: Samples) -> Samples:
        """All exported contexts of a group, in the order of its slots. Raises GroupEnd."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSettings:
    """How the groups of one mode run.

    `text_only`: what takes the samples cannot take images. `one_context`: why a session may export no more than one
    context, None where it may. `one_reward`: the contexts of a session share one reward, from which credit is made.
    """

    mode: Mode
    num_samples: int
    min_size: int
    num_retries: int
    text_only: bool = False
    one_context: str | None = None
    one_reward: bool = False
    shared_prefix: SharedPrefix = "once"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a session ended, before it is written. `retry`: its slot may get another session."""

    status: SessionStatus
    samples: Samples = ()
    reason: str | None = None
    message: str | None = None
    reward: float | None = None
    metadata: JsonObject = field(default_factory=dict[str, object])
    retry: bool = True

    @classmethod
    def exported(cls, samples: Samples) -> Outcome:
        """Reward and metadata of a session are those of the context that carries its reward, else the first's."""
        first = next((sample for sample in samples if sample.reward is not None), samples[0])
        return cls(status="exported", samples=samples, reward=first.reward, metadata=first.metadata)

    @classmethod
    def failed(cls, failure: SessionFailure, *, retry: bool = True) -> Outcome:
        return cls(status="failed", reason=failure.reason, message=str(failure), retry=retry)


def too_few_left(num_left: int, num_slots: int, settings: GroupSettings) -> GroupEnd | None:
    """The end of a group of which too few sessions are left; None where enough are."""
    if num_left >= settings.min_size:
        return None
    return GroupEnd(
        "group_too_small" if num_left else "all_sessions_failed",
        f"{num_left} of {num_slots} sessions are left, and {settings.min_size} are needed (--agentic-min-group-size)",
    )


def refuse_several(samples: Sequence[TrainingSample], one_context: str | None) -> None:
    """Raise SessionFailure where a session has more than one context and, for the reason given, may not."""
    if one_context is not None and len(samples) > 1:
        what = f"session {samples[0].session_id} exported {len(samples)} contexts"
        raise SessionFailure("several_contexts", f"{what}; {one_context}")


def judged(settings: GroupSettings, verdict: Samples | SessionFailure) -> Outcome:
    """The end of a session whose judgement is done: what it lacks then, another run of its agent would not give."""
    if not isinstance(verdict, SessionFailure) and settings.one_reward:
        try:
            session_reward(verdict)
        except SessionFailure as failure:
            verdict = failure
    if isinstance(verdict, SessionFailure):
        return Outcome.failed(verdict, retry=False)
    return Outcome.exported(verdict)


def refuse_images(samples: Iterable[TrainingSample]) -> None:
    """Raise SessionFailure where a sample holds images."""
    for sample in samples:
        if sample.images:
            raise SessionFailure(
                "images_not_trainable",
                f"the context to train on holds {len(sample.images)} image(s), and the trainer of this version takes "
                "text only; use silva rollout to collect samples with images, or an agent that sends none",
            )
