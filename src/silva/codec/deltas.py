"""What the codec takes and gives: the sampled turn that a delta follows, and the delta itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from silva.types import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnDelta:
    """Token ids that were given, not sampled (mask 0).

    `observation_ids`: what closes the turn before (unless the model sampled it) and the new messages, without the
    generation prompt: the common token prefix of the renders with and without it. `opening_ids`: what the generation
    prompt adds; it belongs to the response that follows and may be empty. `marker_mismatch`: the model ended its turn
    with the role marker of another kind of message than the one that follows, so both markers stand in the context.
    """

    observation_ids: list[int]
    opening_ids: list[int]
    marker_mismatch: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """The messages before a sampled turn, as they stand in its lineage. The first `num_given` of them were there before
    any turn was sampled."""

    messages: tuple[Message, ...]
    num_given: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTail:
    """The sampled assistant turn that a delta follows.

    `message` is the turn as parsed, with the real names of its calls; `last_id` the last id of the turn that stands in
    the context; `cut` says that no stop id was sampled, so the delta has to write the closing token. `has_system` may
    tell whether the conversation starts with a system message: some templates write a turn otherwise when it does, and
    a transition is refused only where that matters. None stands for unknown, which is judged as strictly as both.
    `past` gives the messages before the turn; it is called only where a step depends on them, and without it that step
    is refused.
    """

    message: Message
    last_id: int
    cut: bool
    has_system: bool | None = None
    past: Callable[[], Past] | None = None
