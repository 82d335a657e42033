"""What the codec takes and gives: the sampled turn that a delta follows, and the delta itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from silva.types import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnDelta:
    """Token ids that were given, not sampled (mask 0).

    Example: behind a sampled "hello<|im_end|>", the message `user: more` gives `observation_ids` of the text
    `\\n<|im_start|>user\\nmore<|im_end|>\\n` and `opening_ids` of `<|im_start|>assistant\\n`.
    """

    observation_ids: list[int]
    """What closes the turn before (unless the model sampled it) and the new messages, without the generation prompt:
    the common token prefix of the renders with and without it."""
    opening_ids: list[int]
    """What the generation prompt adds; it belongs to the response that follows and may be empty."""
    marker_mismatch: bool = False
    """Whether the model ended its turn with the role marker of another kind of message than the one that follows, so
    that the context contains both markers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """The messages before a sampled turn, as its lineage has them."""

    messages: tuple[Message, ...]
    """All of them, in order."""
    num_given: int
    """How many of them, from the first, were there before any turn was sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTail:
    """The sampled assistant turn that a delta follows."""

    message: Message
    """The turn as parsed, with the real names of its calls."""
    last_id: int
    """The last id of the turn in the context."""
    cut: bool
    """Whether no stop id was sampled, so that the delta has to write the closing token."""
    has_system: bool | None = None
    """Whether the conversation starts with a system message, because some templates write a turn differently when it
    does. None means unknown: the step must then be the same in both cases."""
    past: Callable[[], Past] | None = None
    """Returns the messages before the turn; called only where a step depends on them. None: such a step is refused."""
