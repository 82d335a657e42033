"""System messages where a chat template forbids them: a user turn with a mark, so that no text is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from silva.types import Message, TransitionRefused, join_texts

LATE_SYSTEM_MARK = "[system message]\n"
"""Comes before the text of a system message that is written as a user turn."""

T = TypeVar("T")


def encode_late_system(messages: Sequence[Message], first: int, encode: Callable[[Sequence[Message]], T]) -> T:
    """`encode` these messages; where the template raises, with all system messages from `first` on as user turns.

    Only what a template forbids is rewritten: where it drops or moves such a message, the step stays refused. Raises
    the first TransitionRefused where the template does not take the user turns either.
    """
    try:
        return encode(messages)
    except TransitionRefused as refused:
        if not refused.raised or all(message.role != "system" for message in messages[first:]):
            raise
        try:
            return encode(as_user_turns(messages, first))
        except TransitionRefused:
            raise refused from None


def as_user_turns(messages: Sequence[Message], first: int) -> tuple[Message, ...]:
    """The messages with each system message from `first` on as a marked user turn."""
    return (*messages[:first], *map(_as_user, messages[first:]))


def _as_user(message: Message) -> Message:
    if message.role != "system":
        return message
    parts = join_texts((LATE_SYSTEM_MARK, *message.parts)) if message.parts else ()
    return replace(message, role="user", content=LATE_SYSTEM_MARK + message.content, parts=parts)
