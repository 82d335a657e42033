"""Where a request meets the forest, and what a turn is written as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from silva.forest.node import EchoAlias, Node
from silva.forest.profiles import REPAIR_PREFIX
from silva.forest.prompt_ids import PromptIds
from silva.types import Conversation, GenerateResult, Image, MatchKind, Message, images_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """Where a request meets the forest.

    Example: of a request with three messages, the first two lead to an answer: `num_messages=3`, `num_matched=2`,
    `parent` is that response and `kind` is "append", or "branch" where something follows it already.
    """

    conversation: Conversation
    """Tools and template arguments that the model reads."""
    root: bytes
    """Key of the empty conversation."""
    request_key: bytes
    """Key of the state that the whole request leads to."""
    num_messages: int
    """Messages of the request."""
    parent: Node | None
    """The matched state; None where not even the root exists yet."""
    num_matched: int
    """Messages of the request that the matched state contains."""
    aliases: tuple[EchoAlias, ...] = ()
    """Lossy echoes that were repaired on the way."""
    result_ids: Sequence[str | None] = ()
    """For each message the id that a tool result under a renamed id refers to, else None; empty without any."""
    profiles: tuple[str, ...] = ()
    """Profiles that left noise of the first message out of the digests."""

    @property
    def repairs(self) -> list[str]:
        """Kinds of the repairs, message by message; noise that a profile took out goes first."""
        return [
            *(REPAIR_PREFIX + name for name in self.profiles),
            *(kind for alias in self.aliases for kind in alias.repair.kinds),
        ]

    def as_known(self, start: int, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Messages of the request from `start` on, the tool results under the ids that the calls were given."""
        ids = self.result_ids[start : start + len(messages)]
        if not any(ids):
            return messages
        return tuple(
            replace(message, tool_call_id=known) if known else message
            for message, known in zip(messages, ids, strict=True)
        )

    @property
    def is_full(self) -> bool:
        return self.num_matched == self.num_messages

    @property
    def kind(self) -> MatchKind:
        if self.parent is None or self.parent.kind == "root":
            return "root"
        return "branch" if self.parent.children else "append"

    def at_last_turn(self) -> Match:
        """The same request, matched at the last sampled turn (or root) above the matched observation."""
        parent, num_matched = self.parent, self.num_matched
        while parent is not None and parent.kind == "observation":
            num_matched -= len(parent.messages)
            parent = parent.parent
        return replace(self, parent=parent, num_matched=num_matched)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """How a new turn is placed in the forest and what the engine is given.

    Example: `messages=(user "more",)`, `observation_ids=(10, 11)`, `lead_ids=(1,)` below a state of 40 tokens give
    the engine 43 ids.
    """

    match: Match
    """Where the turn goes."""
    messages: tuple[Message, ...] = ()
    """Messages of the new observation; empty: there is none."""
    observation_ids: Sequence[int] = ()
    """Ids of that observation."""
    lead_ids: tuple[int, ...] = ()
    """Ids that open the response."""
    continues: bool = False
    """The response goes on with the cut turn that was matched."""
    marker_mismatch: bool = False
    """The turn above ended with another marker than the template writes."""

    def prompt_ids(self) -> PromptIds:
        """The ids that the engine gets: root to opening."""
        return PromptIds(self.match.parent, self.observation_ids, self.lead_ids)

    def input_ids(self) -> list[int]:
        """The same as a list."""
        return list(self.prompt_ids())

    def images(self) -> tuple[Image, ...]:
        """The images that belong to these ids, in order."""
        held = self.match.parent.path_images() if self.match.parent is not None else ()
        return held + images_of(self.messages)


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """A generated turn, ready to be written. A client may echo `message` or `told`."""

    result: GenerateResult
    """What the engine returned."""
    message: Message
    """The assistant message of the whole turn."""
    digest: bytes
    """Its digest."""
    told: Message | None = None
    """What the client received where that differs (the new part of a cut turn, a call as text); None: `message`."""
    request_id: str | None = None
    """The request that made it."""
    num_aborts: int = 0
    """Aborted engine calls on the way."""
