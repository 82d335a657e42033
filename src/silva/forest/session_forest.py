"""The forest of one session: every committed conversation state, token by token.

Look, then write: `match` is pure; `commit` writes a turn, `add` puts back what was stored. A state exists at the end of
each committed observation and of each response, nowhere inside. Nodes store only what they add; joined along parents
they are exactly what the engine saw and produced.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from silva.forest.echo import NO_RENAMES, EchoAlias, EchoIndex, MessageAt, Renames
from silva.forest.identity import chain_key, message_digest, root_key
from silva.forest.profiles import REPAIR_PREFIX
from silva.forest.prompt_ids import PromptIds
from silva.types.generation import FinishReason, GenerateResult, VersionSpan
from silva.types.messages import Conversation, Image, Message, images_of
from silva.types.rollout import MatchKind

NodeKind = Literal["root", "observation", "response"]
MAX_SPELLINGS = 32
"""So many lossy spellings of a state are remembered; a client may make up new call ids in each request."""


class Node:
    """One committed state.

    `lead` counts the ids at the front of `ids` that were not sampled (all of an observation's). `before` is, for a
    response, the key of the state that its assistant message answers, and `told` what the client got of it: its own
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
        """A response that went on with the cut one above it: its message stands in the place of that one's."""
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
        """The answers of this one's run as one message, as they were told; None where it is the answer itself.

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

    def path_ids(self) -> list[int]:
        """All ids from the root to the end of this node."""
        return list(PromptIds(self))

    def path_images(self) -> tuple[Image, ...]:
        """All images from the root to the end of this node, in the order in which the model sees them."""
        if not self.num_images:
            return ()
        return tuple(image for node in self.path() for image in node.images)


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


@dataclass(kw_only=True, slots=True)
class _Chain:
    """A history read message by message: after each its key, the renamed calls that still count, and for a tool result
    under a renamed id the id that it stands for."""

    digests: list[bytes] = field(default_factory=list[bytes])
    keys: list[bytes] = field(default_factory=list[bytes])
    renames: list[Renames] = field(default_factory=list[Renames])
    result_ids: list[str | None] = field(default_factory=list["str | None"])

    def first(self, length: int, digests: list[bytes]) -> _Chain:
        """A chain for these digests that knows the first `length` steps of this one."""
        return _Chain(
            digests=digests,
            keys=self.keys[:length],
            renames=self.renames[:length],
            result_ids=self.result_ids[:length],
        )


class SessionForest:
    """All committed states of one session."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._by_key: dict[bytes, Node] = {}
        self._num_responses: dict[bytes, int] = {}
        self._memos: dict[bytes, _Chain] = {}
        self._last_root: tuple[Conversation, bytes] | None = None
        self._echoes = EchoIndex()
        self._renames: dict[bytes, Renames] = {}
        self._num_spellings: dict[bytes, int] = {}
        self._unsaid: dict[bytes, tuple[Node, bytes]] = {}
        """A history that lacks an empty answer -> that answer, and the key of the whole history."""

    def root_of(self, conversation: Conversation) -> bytes:
        """Key of the empty conversation with these tools and arguments. Raises RequestError as `root_key`."""
        if self._last_root is None or self._last_root[0] is not conversation:
            self._last_root = (conversation, root_key(conversation))
        return self._last_root[1]

    def match(
        self,
        conversation: Conversation,
        digests: Sequence[bytes],
        message_at: MessageAt | None = None,
        lenient: bool = False,
    ) -> Match:
        """The longest committed prefix of a history (one digest a message). Changes no state; it only memoises keys.

        With `lenient` an assistant message that lost something on its way back still is the answer that was sampled;
        `message_at` (needed then) forms the messages that have to be looked at. What is known as it stands goes first.
        """
        root = self.root_of(conversation)
        chain = self._chain(root, list(digests), message_at)
        parent, num_matched = self._by_key.get(root), 0
        for length in range(len(chain.keys), 0, -1):
            node = self._by_key.get(chain.keys[length - 1])
            if node is not None:
                parent, num_matched = node, length
                break
        aliases: list[EchoAlias] = []
        if lenient and message_at is not None and parent is not None and num_matched:
            chain, num_matched, parent = self._repair(chain, num_matched, parent, message_at, aliases)
        known = self._by_key.get(root)
        return Match(
            # Tools may be the same without being equal; the model goes on reading those that it read.
            conversation=conversation if known is None else known.conversation,
            root=root,
            request_key=chain.keys[-1] if chain.keys else root,
            num_messages=len(chain.keys),
            parent=parent,
            num_matched=num_matched,
            aliases=tuple(aliases),
            result_ids=chain.result_ids if any(chain.result_ids) else (),
        )

    def _chain(self, root: bytes, digests: list[bytes], message_at: MessageAt | None) -> _Chain:
        """Keys after each message. A key that is an alias of a state goes on as that state's own key."""
        old = self._memos.get(root, _Chain())
        known = len(old.digests)
        if old.digests != digests[:known]:
            known = _common_prefix(old.digests, digests)
        chain = old.first(known, digests)
        for index in range(known, len(digests)):
            self._step(root, chain, index, message_at)
        self._memos[root] = chain
        return chain

    def _step(self, root: bytes, chain: _Chain, index: int, message_at: MessageAt | None) -> bytes:
        """Add the next message to a chain. Returns the key by its own words, which an alias may have replaced."""
        digest, result_id = chain.digests[index], None
        renames = chain.renames[-1] if chain.renames else NO_RENAMES
        if renames and message_at is not None:
            message = message_at(index)
            if message.role == "assistant":
                renames = NO_RENAMES
            else:
                result_id = renames.get(message.tool_call_id or "")
            if result_id is not None:
                digest = message_digest(replace(message, tool_call_id=result_id))
        spelled = key = chain_key(chain.keys[-1] if chain.keys else root, digest)
        node = self._by_key.get(key)
        if node is None and key in self._unsaid:
            renames, key = NO_RENAMES, self._unsaid[key][1]
        elif node is not None and node.key != key:
            renames = self._renames.get(key, NO_RENAMES)
            key = node.key
        chain.keys.append(key)
        chain.renames.append(renames)
        chain.result_ids.append(result_id)
        return spelled

    def _repair(
        self, exact: _Chain, length: int, parent: Node, message_at: MessageAt, aliases: list[EchoAlias]
    ) -> tuple[_Chain, int, Node]:
        """Read on behind the `length` messages that lead to `parent` as they stand, with lossy echoes repaired.

        Only the message behind a state can be an echo of an answer to it, or lack one. Each step is made once, since a
        long history may need many repairs.
        """
        num = len(exact.digests)
        chain = exact.first(length, exact.digests)
        for index in range(length, num):
            state = chain.keys[-1]
            spelled = self._step(b"", chain, index, message_at)
            if chain.keys[-1] not in self._by_key and index == length:
                if (found := self._echoes.find(state, index, message_at, num)) is not None:
                    node, repair = found
                    aliases.append(EchoAlias(key=spelled, node=node, repair=repair))
                    chain.keys[-1], chain.renames[-1] = node.key, repair.renames
                elif (alias := self._missing(state, spelled, exact.digests[index], message_at, index)) is not None:
                    aliases.append(alias)
                    parent = alias.node
                    chain.keys[-1], chain.renames[-1] = alias.beyond or parent.key, NO_RENAMES
            known = self._by_key.get(chain.keys[-1])
            if known is not None:
                length, parent = index + 1, known
            elif not aliases:
                return exact, length, parent
        return chain, length, parent

    def _missing(
        self, state: bytes, spelled: bytes, digest: bytes, message_at: MessageAt, index: int
    ) -> EchoAlias | None:
        """The empty answer to `state` that the request left out before message `index`.

        No results can follow an answer without calls, and two answers in a row are none left out.
        """
        found = self._echoes.unsaid(state)
        if found is None or message_at(index).role not in ("user", "system"):
            return None
        node, repair = found
        if spelled in self._unsaid:  # as it was read before, whatever was answered since
            node, beyond = self._unsaid[spelled]
        else:
            beyond = chain_key(node.key, digest)
        return EchoAlias(key=spelled, node=node, repair=repair, beyond=beyond)

    def node_of(self, key: bytes) -> Node | None:
        """The state with this key, the newest of several."""
        return self._by_key.get(key)

    def unknown_spellings(self, match: Match) -> list[EchoAlias]:
        """Those repairs of a match that no committed turn has brought yet."""
        return [alias for alias in match.aliases if alias.key not in self._by_key and alias.key not in self._unsaid]

    def next_sibling(self, request_key: bytes) -> int:
        """How many responses the state with this key has had."""
        return self._num_responses.get(request_key, 0)

    def commit(self, placement: Placement, response: Response) -> Node:
        """Write one turn: its observation (once) and its response. Returns the response node."""
        match = placement.match
        above = self._observation(placement, response.request_id)
        node = Node(
            node_id=len(self.nodes),
            parent=above,
            key=b"",
            kind="response",
            messages=(response.message,),
            conversation=above.conversation,
            ids=(*placement.lead_ids, *response.result.ids),
            lead=len(placement.lead_ids),
            request_id=response.request_id,
        )
        node.before = above.before if placement.continues else match.request_key
        node.key = chain_key(node.before, response.digest)
        node.logprobs = array("f", response.result.logprobs)
        node.kept_mass = array("f", response.result.kept_mass)
        node.spans = response.result.version_spans
        node.finish = response.result.finish_reason
        node.num_aborts = response.num_aborts
        node.told = response.told or response.message
        node.spellings = match.aliases
        self.add(node)
        return node

    def add(self, node: Node) -> None:
        """Let a node that was formed stand in the forest, and be found. Nodes come in the order of their ids."""
        assert node.node_id == len(self.nodes), f"node {node.node_id} cannot come after {len(self.nodes)} others"
        node.spellings = tuple(alias for alias in node.spellings if self._spelling(alias))
        self.nodes.append(node)
        holder = self._by_key.get(node.key)
        if (holder is not None and holder.key != node.key) or self._unsaid.pop(node.key, None) is not None:
            self._memos.clear()
        self._by_key[node.key] = node
        if node.parent is not None:
            node.parent.children.append(node)
        if node.kind == "response":
            self._answer(node)

    def _answer(self, node: Node) -> None:
        """Let a response be found by every form in which it may be echoed."""
        above, said, told = node.parent, node.messages[0], node.told
        assert above is not None and told is not None
        state = above.key if node.continues else node.before
        self._echoes.add(node.before, said, node)
        if node.continues or told != said:
            self._alias(chain_key(state, message_digest(told)), node)
            self._echoes.add(state, told, node)
        if above.kind == "response":
            self._join_told(node)
        self._num_responses[state] = self._num_responses.get(state, 0) + 1

    def _join_told(self, node: Node) -> None:
        """Let answers that came one after the other be echoed as one message, as clients and protocols merge them."""
        joined = node.joined()
        if joined is not None:
            before = node.run()[0].before
            self._alias(chain_key(before, message_digest(joined)), node)
            self._echoes.add(before, joined, node)

    def _alias(self, key: bytes, node: Node) -> None:
        """Let a second spelling of a history lead to a state. A state that owns this key keeps it, with all below."""
        holder = self._by_key.get(key)
        if holder is not None and holder.key == key:
            return
        self._by_key[key] = node
        self._renames.pop(key, None)
        if holder is not None:
            self._memos.clear()
        else:
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        """Read histories with this key anew from there on: it leads somewhere else now."""
        for root, memo in self._memos.items():
            if key in memo.keys:
                length = memo.keys.index(key)
                self._memos[root] = memo.first(length, memo.digests[:length])

    def _spelling(self, alias: EchoAlias) -> bool:
        """Remember a lossy echo, so that it needs no repair again. False where that changed nothing."""
        if alias.key in self._by_key or alias.key in self._unsaid:
            return False
        if alias.beyond is not None:
            self._unsaid[alias.key] = (alias.node, alias.beyond)
            self._forget(alias.key)
            return True
        number = self._num_spellings.get(alias.node.key, 0)
        if number == MAX_SPELLINGS:
            return False
        self._num_spellings[alias.node.key] = number + 1
        self._alias(alias.key, alias.node)
        self._renames[alias.key] = alias.repair.renames
        return True

    def _observation(self, placement: Placement, request_id: str | None) -> Node:
        match = placement.match
        above = match.parent or self._by_key.get(match.root)
        if above is None:
            above = self._given(None, match.root, match.conversation)
        if not placement.messages:
            return above
        ids = array("i", placement.observation_ids)
        for child in above.children:
            if child.kind == "observation" and child.key == match.request_key and child.ids == ids:
                return child
        return self._given(
            above, match.request_key, above.conversation, placement.messages, ids=ids, request_id=request_id
        )

    def _given(
        self,
        parent: Node | None,
        key: bytes,
        conversation: Conversation,
        messages: tuple[Message, ...] = (),
        *,
        ids: Sequence[int] = (),
        request_id: str | None = None,
    ) -> Node:
        """A new root, or a new observation under `parent`."""
        node = Node(
            node_id=len(self.nodes),
            parent=parent,
            key=key,
            kind="root" if parent is None else "observation",
            messages=messages,
            conversation=conversation,
            ids=ids,
            request_id=request_id,
        )
        self.add(node)
        return node


def _common_prefix(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
