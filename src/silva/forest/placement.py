"""Where a request meets the forest, and what a turn is written as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from silva.forest.node import EchoAlias, Node
from silva.forest.profiles import REPAIR_PREFIX
from silva.forest.prompt_ids import PromptIds
from silva.types.generation import GenerateResult
from silva.types.messages import Conversation, Image, Message, images_of
from silva.types.rollout import MatchKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """Where a request meets the forest.

    `parent` is the matched state (None: not even the technical root exists yet) and `num_matched` says how many of the
    request's messages it holds. `request_key` is the key of the state that the whole request leads to. `aliases` are
    the lossy echoes that had to be repaired on the way, and `result_ids` the ids that tool results of the request stand
    for where the client names the calls its own way (by message; None where it does not; empty: nowhere). `profiles`
    are those that left noise of the first message out of the digests.
    """

    conversation: Conversation
    root: bytes
    request_key: bytes
    num_messages: int
    parent: Node | None
    num_matched: int
    aliases: tuple[EchoAlias, ...] = ()
    result_ids: Sequence[str | None] = ()
    profiles: tuple[str, ...] = ()

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
    """How a new turn hangs in the forest and what the engine is given.

    Under the matched state comes an observation of `messages` with `observation_ids` (none where `messages` is empty),
    then the response, which owns `lead_ids`. With `continues` the response goes on with the cut turn that was matched.
    """

    match: Match
    messages: tuple[Message, ...] = ()
    observation_ids: Sequence[int] = ()
    lead_ids: tuple[int, ...] = ()
    continues: bool = False
    marker_mismatch: bool = False

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
    """A generated turn, ready to be written.

    `message` is the assistant message of the whole turn. Where the client was told another one, it is `told`, since a
    client may echo either form. So it is where a cut turn was continued (`message` holds all parts joined, the told one
    only the new part), and where a protocol cannot carry a call.
    """

    result: GenerateResult
    message: Message
    digest: bytes
    told: Message | None = None
    request_id: str | None = None
    num_aborts: int = 0
