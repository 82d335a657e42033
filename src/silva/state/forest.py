"""The forest of one session: every committed conversation state, token by token.

Look, then write: `match` is pure; `commit` is the only writer. A state exists at the end of each committed observation
and of each response, nowhere inside. Nodes store only what they add; joined along parents they are exactly what the
engine saw and produced.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from silva.state.identity import chain_key, root_key
from silva.types.generation import FinishReason, GenerateResult, VersionSpan
from silva.types.messages import Conversation, Message
from silva.types.rollout import MatchKind

NodeKind = Literal["root", "observation", "response"]


class Node:
    """One committed state.

    `lead` counts the ids at the front of `ids` that were not sampled (all of an observation's). `before` is, for a
    response, the key of the state that its assistant message answers.
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
        "num_tokens",
        "parent",
        "request_id",
        "spans",
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
        lead: int | None = None,
        request_id: str | None = None,
    ):
        self.node_id = node_id
        self.parent = parent
        self.key = key
        self.kind: NodeKind = kind
        self.messages = messages
        self.conversation = conversation
        self.ids = array("i", ids)
        self.lead = len(self.ids) if lead is None else lead
        self.num_tokens = len(self.ids) + (parent.num_tokens if parent else 0)
        self.request_id = request_id
        self.logprobs = array("f")
        self.kept_mass = array("f")
        self.spans: tuple[VersionSpan, ...] = ()
        self.finish: FinishReason | None = None
        self.num_aborts = 0
        self.children: list[Node] = []
        self.before = b""

    @property
    def sampled(self) -> array[int]:
        """The ids of this node that the engine sampled."""
        return self.ids[self.lead :]

    @property
    def cut(self) -> bool:
        """A response that ended by length: its turn is still open."""
        return self.kind == "response" and self.finish == "length"

    def path(self) -> list[Node]:
        """Nodes from the technical root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def path_ids(self) -> list[int]:
        """All ids from the root to the end of this node."""
        joined: array[int] = array("i")
        for node in self.path():
            joined.extend(node.ids)
        return joined.tolist()


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """Where a request meets the forest.

    `parent` is the matched state (None: not even the technical root exists yet) and `num_matched` says how many of the
    request's messages it holds. `request_key` is the key of the state that the whole request leads to.
    """

    conversation: Conversation
    root: bytes
    request_key: bytes
    num_messages: int
    parent: Node | None
    num_matched: int

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
    observation_ids: tuple[int, ...] = ()
    lead_ids: tuple[int, ...] = ()
    continues: bool = False
    marker_mismatch: bool = False

    def input_ids(self) -> list[int]:
        """The ids that the engine gets: root to opening."""
        ids = self.match.parent.path_ids() if self.match.parent is not None else []
        ids.extend(self.observation_ids)
        ids.extend(self.lead_ids)
        return ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """A generated turn, ready to be written.

    `message` is the assistant message of the whole turn. Where a cut turn was continued it holds both parts joined and
    `continuation` the new part alone, since a client may echo either form.
    """

    result: GenerateResult
    message: Message
    digest: bytes
    continuation_digest: bytes | None = None
    request_id: str | None = None
    num_aborts: int = 0


class SessionForest:
    """All committed states of one session."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._by_key: dict[bytes, Node] = {}
        self._num_responses: dict[bytes, int] = {}
        self._memos: dict[bytes, tuple[list[bytes], list[bytes]]] = {}
        self._last_root: tuple[Conversation, bytes] | None = None

    def match(self, conversation: Conversation, digests: Sequence[bytes]) -> Match:
        """The longest committed prefix of a history (one digest a message). Changes no state; it only memoises keys."""
        if self._last_root is None or self._last_root[0] is not conversation:
            self._last_root = (conversation, root_key(conversation))
        root = self._last_root[1]
        keys = self._chain(root, list(digests))
        parent, num_matched = self._by_key.get(root), 0
        for length in range(len(keys), 0, -1):
            node = self._by_key.get(keys[length - 1])
            if node is not None:
                parent, num_matched = node, length
                break
        return Match(
            conversation=conversation,
            root=root,
            request_key=keys[-1] if keys else root,
            num_messages=len(keys),
            parent=parent,
            num_matched=num_matched,
        )

    def _chain(self, root: bytes, digests: list[bytes]) -> list[bytes]:
        """Keys after each message. A key that is an alias of a state goes on as that state's own key."""
        old_digests, old_keys = self._memos.get(root, ([], []))
        known = len(old_digests)
        if old_digests != digests[:known]:
            known = _common_prefix(old_digests, digests)
        keys = old_keys[:known]
        key = keys[-1] if keys else root
        for digest in digests[known:]:
            key = chain_key(key, digest)
            node = self._by_key.get(key)
            key = key if node is None else node.key
            keys.append(key)
        self._memos[root] = (digests, keys)
        return keys

    def next_sibling(self, request_key: bytes) -> int:
        """How many responses the state with this key has had."""
        return self._num_responses.get(request_key, 0)

    def commit(self, placement: Placement, response: Response) -> Node:
        """Write one turn: its observation (once) and its response. Returns the response node."""
        match = placement.match
        above = self._observation(placement, response.request_id)
        before = above.before if placement.continues else match.request_key
        node = self._add(
            parent=above,
            key=chain_key(before, response.digest),
            kind="response",
            messages=(response.message,),
            ids=(*placement.lead_ids, *response.result.ids),
            lead=len(placement.lead_ids),
            request_id=response.request_id,
        )
        node.before = before
        node.logprobs = array("f", response.result.logprobs)
        node.kept_mass = array("f", response.result.kept_mass)
        node.spans = response.result.version_spans
        node.finish = response.result.finish_reason
        node.num_aborts = response.num_aborts
        if response.continuation_digest is not None:
            self._alias(chain_key(match.request_key, response.continuation_digest), node)
        self._num_responses[match.request_key] = self._num_responses.get(match.request_key, 0) + 1
        return node

    def _alias(self, key: bytes, node: Node) -> None:
        """Let a second spelling of a history lead to a state. A state that owns this key keeps it, with all below."""
        holder = self._by_key.get(key)
        if holder is None or holder.key != key:
            self._by_key[key] = node
            self._memos.clear()

    def _observation(self, placement: Placement, request_id: str | None) -> Node:
        match = placement.match
        above = match.parent or self._by_key.get(match.root)
        if above is None:
            above = self._add(parent=None, key=match.root, kind="root", conversation=match.conversation)
        if not placement.messages:
            return above
        ids = array("i", placement.observation_ids)
        for child in above.children:
            if child.kind == "observation" and child.key == match.request_key and child.ids == ids:
                return child
        return self._add(
            parent=above,
            key=match.request_key,
            kind="observation",
            messages=placement.messages,
            ids=ids,
            request_id=request_id,
        )

    def _add(
        self,
        *,
        parent: Node | None,
        key: bytes,
        kind: NodeKind,
        messages: tuple[Message, ...] = (),
        conversation: Conversation | None = None,
        ids: Sequence[int] = (),
        lead: int | None = None,
        request_id: str | None = None,
    ) -> Node:
        if conversation is None:
            assert parent is not None
            conversation = parent.conversation
        node = Node(
            node_id=len(self.nodes),
            parent=parent,
            key=key,
            kind=kind,
            messages=messages,
            conversation=conversation,
            ids=ids,
            lead=lead,
            request_id=request_id,
        )
        self.nodes.append(node)
        holder = self._by_key.get(key)
        if holder is not None and holder.key != key:
            self._memos.clear()
        self._by_key[key] = node
        if parent is not None:
            parent.children.append(node)
        return node


def _common_prefix(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
