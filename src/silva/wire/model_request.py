"""One model request in canonical form, whatever the protocol: what the turn service takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from silva.forest import MessagesBetween
from silva.types import Conversation, Message, TurnOptions
from silva.wire.images import RequestImages


def _message_path(index: int) -> str:
    return f"messages[{index}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRequest:
    """A request in canonical form."""

    options: TurnOptions
    """What it asks for besides its history."""
    conversation: Conversation
    """Tools and template arguments."""
    digests: list[bytes]
    """One per message of the history."""
    messages_between: MessagesBetween
    """Forms the messages from one index to another. Most requests need only the newest."""
    path_of: Callable[[int], str] = _message_path
    """Path in the body of a canonical message, by index."""
    images: RequestImages = field(default_factory=RequestImages)
    """Images of the messages that were formed so far."""

    def message_at(self, index: int) -> Message:
        """One message of the history."""
        return self.messages_between(index, index + 1)[0]
