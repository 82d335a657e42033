"""One model request in canonical form: what the turn service takes, whoever asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from silva.forest.echo import MessagesBetween
from silva.types.messages import Conversation, Message
from silva.types.turn import TurnOptions
from silva.wire.images import RequestImages


def _message_path(index: int) -> str:
    return f"messages[{index}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRequest:
    """A request in canonical form: one digest a message; the messages themselves are formed where asked for."""

    options: TurnOptions
    conversation: Conversation
    digests: list[bytes]
    messages_between: MessagesBetween
    path_of: Callable[[int], str] = _message_path
    """Where in the body a canonical message stands."""
    images: RequestImages = field(default_factory=RequestImages)
    """Those of the messages that were formed so far."""

    def message_at(self, index: int) -> Message:
        """One message of the history."""
        return self.messages_between(index, index + 1)[0]
