"""One committed state of a conversation, and the other spellings that lead to it.

A node is a root (tools and template arguments, no ids), an observation (what the model was given) or a response (what
it sampled). It stores only what it adds to its parent, and nothing above it ever changes.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from silva.types import Conversation, FinishReason, GenerateResult, Image, Message, VersionSpan, images_of

NodeKind = Literal["root", "observation", "response"]
RepairKind = Literal["blanks", "reasoning_missing", "call_ids", "answer_missing", "ambiguous"]
Renames = Mapping[str, str]
"""A client's id of a call -> the id that it was given."""

NO_RENAMES: Renames = {}
"""Never written to."""


class Node:
    """One committed state.

    Example: the answer to "hi" has `kind="response"`, `ids=[1, 7, 2]` with `lead=1` (the opening id 1 was not sampled),
    `sampled=[7, 2]`, `logprobs=[-0.5, -0.25]`, `finish="stop"` and an observation as its parent.

    `lead` counts the ids at the front of `ids` that were not sampled (all of an observation's). `before` is, for a
    response, the key of the state that its assistant message answers, and `told` what its client received: its own
    part of a turn, where a protocol cannot carry a call as text. `spellings` are the lossy echoes of a response's
    request that were new to the forest.
    """

    __slots__ = (
        "before",
        "children",
        "conversation",
        "finish",
        "ids",
        "kept_mass",
        "key",
        "kind",
        "lead",
        "logprobs",
        "messages",
        "node_id",
        "num_aborts",
        "num_images",
        "num_tokens",
        "parent",
        "request_id",
        "spans",
        "spellings",
        "told",
    )

    def __init__(
        self,
        *,
        node_id: int,
        parent: Node | None,
        key: bytes,
        kind: NodeKind,
        messages: tuple[Message, ...],
        conversation: Conversation,
        ids: Sequence[int] = (),
        request_id: str | None = None,
    ):
        self.node_id = node_id
        self.parent = parent
        self.key = key
        self.kind: NodeKind = kind
        self.messages = messages
        self.conversation = conversation
        self.ids = array("i", ids)
        self.lead = len(self.ids)
        self.num_tokens = len(self.ids) + (parent.num_tokens if parent else 0)
        self.num_images = len(self.images) + (parent.num_images if parent else 0)
        self.request_id = request_id
        self.logprobs = array("f")
        self.kept_mass = array("f")
        self.spans: tuple[VersionSpan, ...] = ()
        self.finish: FinishReason | None = None
        self.num_aborts = 0
        self.children: list[Node] = []
        self.before = b""
        self.told: Message | None = None
        self.spellings: tuple[EchoAlias, ...] = ()

    def sample(self, result: GenerateResult, *, num_aborts: int = 0) -> None:
        """Make the last ids of this response those that the engine sampled."""
        self.lead = len(self.ids) - len(result.ids)
        self.logprobs = array("f", result.logprobs)
        self.kept_mass = array("f", result.kept_mass)
        self.spans = result.version_spans
        self.finish = result.finish_reason
        self.num_aborts = num_aborts

    @property
    def sampled(self) -> array[int]:
        """The ids of this node that the engine sampled."""
        return self.ids[self.lead :]

    @property
    def images(self) -> tuple[Image, ...]:
        """The images of this node's own messages."""
        return images_of(self.messages)

    @property
    def cut(self) -> bool:
        """A response that ended by length: its turn is still open."""
        return self.kind == "response" and self.finish == "length"

    @property
    def continues(self) -> bool:
        """A response that continued the cut one above it: its message replaces that one's."""
        parent = self.parent
        return parent is not None and self.kind == parent.kind == "response" and self.before == parent.before

    def run(self) -> list[Node]:
        """The responses without an observation between them that this one ends."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.kind == "response":
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def joined(self) -> Message | None:
        """The answers of this one's run as one message, as its client received them; None where it is the answer.

        An answer that adds nothing has none: the message without it is that of the answers before.
        """
        if self.told == Message(role="assistant"):
            return None
        told = [part.told for part in self.run() if part.told is not None]
        joined = Message(
            role="assistant",
            content="".join(part.content for part in told),
            reasoning="".join(part.reasoning for part in told),
            tool_calls=tuple(call for part in told for call in part.tool_calls),
        )
        return None if joined == self.messages[0] else joined

    def path(self) -> list[Node]:
        """Nodes from the technical root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def path_ids(self) -> array[int]:
        """All ids from the root to the end of this node."""
        joined: array[int] = array("i")
        for node in self.path():
            joined.extend(node.ids)
        return joined

    def path_images(self) -> tuple[Image, ...]:
        """All images from the root to the end of this node, in the order in which the model sees them."""
        if not self.num_images:
            return ()
        return tuple(image for node in self.path() for image in node.images)


@dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """How a lossy echo was read."""

    kinds: tuple[RepairKind, ...]
    """Kinds of loss, none twice."""
    renames: Renames
    """The client's ids of its calls, mapped to those that were given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EchoAlias:
    """A spelling of a history that leads to a state."""

    key: bytes
    """Key of the history as it was spelled."""
    node: Node
    """The answer that it leads to."""
    repair: Repair
    """What was lost."""
    beyond: bytes | None = None
    """Where the answer itself is missing: the key that the message behind it leads to. None otherwise."""
