"""The forest of one session: every committed conversation state, token by token.

Look, then write: `match` is pure; `commit` and `append_tokens` write a turn, `add` restores a stored node. A state
exists at the end of each committed observation and of each response, and nowhere inside. Nodes store only what they
add; joined along their parents they are exactly what the engine saw and produced.

    root ── observation u1 ── response a1 ── observation u2 ── response a2
            (mask 0)          (lead: mask 0, └─ observation u2' ── response a2'    a branch: u1 and a1 are shared
                              sampled: mask 1)

An observation is shared by every turn that brings the same messages as the same ids below the same state. A response is
never shared: sampling once more from a state adds a sibling, even where it says the same. Its key then points to the
newest.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from silva.forest.echo import MessageAt
from silva.forest.identity import TOKEN_ROOT, chain_key, ids_digest, root_key
from silva.forest.node import EchoAlias, Node
from silva.forest.placement import Match, Placement, Response
from silva.forest.state_index import StateIndex
from silva.types import Conversation, GenerateResult, Message


class SessionForest:
    """All committed states of one session."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._index = StateIndex()
        self._num_responses: Counter[bytes] = Counter()
        self._last_root: tuple[Conversation, bytes] | None = None

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
        """The longest committed prefix of a history (one digest per message). It changes no state.

        With `lenient` an assistant message that lost something on its way back is still the answer that was sampled;
        `message_at` (needed then) forms the messages that have to be compared. An exact match always wins over a
        repaired one.
        """
        root = self.root_of(conversation)
        chain, num_matched, parent, aliases = self._index.read(root, list(digests), message_at, lenient=lenient)
        known = self._index.node_of(root)
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

    def node_of(self, key: bytes) -> Node | None:
        """The state with this key, the newest of several."""
        return self._index.node_of(key)

    def unknown_spellings(self, match: Match) -> list[EchoAlias]:
        """Those repairs of a match that no committed turn has brought yet."""
        return [alias for alias in match.aliases if not self._index.is_known(alias.key)]

    def next_sibling(self, request_key: bytes) -> int:
        """How many responses the state with this key has had."""
        return self._num_responses[request_key]

    def commit(self, placement: Placement, response: Response) -> Node:
        """Write one turn: its observation (once) and its response. Returns the response node."""
        match = placement.match
        new: list[Node] = []
        above = match.parent or self._index.node_of(match.root)
        above = above or self._form(new, None, match.root, conversation=match.conversation)
        if placement.messages:
            given = array("i", placement.observation_ids)
            above = self._observation(new, above, match.request_key, placement.messages, given, response.request_id)
        before = above.before if placement.continues else match.request_key
        node = self._form(
            new,
            above,
            chain_key(before, response.digest),
            (response.message,),
            ids=(*placement.lead_ids, *response.result.ids),
            before=before,
            request_id=response.request_id,
        )
        node.sample(response.result, num_aborts=response.num_aborts)
        node.told = response.told or response.message
        node.spellings = match.aliases
        return self._write(new)

    def append_tokens(
        self,
        parent: Node | None,
        observation_ids: Sequence[int],
        result: GenerateResult,
        *,
        request_id: str | None = None,
        num_aborts: int = 0,
    ) -> Node:
        """Write one turn of a caller that has ids and no messages. Returns the response node.

        Under `parent` (None: a new beginning) goes an observation of `observation_ids` (mask 0; none where they are
        empty), then the response with the ids of `result` (mask 1). Closing and opening tokens belong to the
        observation. Identity is chained over ids: the same ids under the same state are the same observation, and no
        request of messages ever leads to such a state.

        Raises ValueError where nothing was sampled or the response would have no prompt; nothing is written then.
        """
        assert parent is None or self.nodes[parent.node_id] is parent, "the parent is a node of another forest"
        if not result.ids or not (observation_ids or (parent is not None and parent.num_tokens)):
            raise ValueError("a turn needs ids that the engine was given and ids that it sampled")
        new: list[Node] = []
        above = parent or self._index.node_of(TOKEN_ROOT) or self._form(new, None, TOKEN_ROOT)
        if observation_ids:
            given = array("i", observation_ids)
            key = chain_key(above.key, ids_digest("observation", given))
            above = self._observation(new, above, key, (), given, request_id)
        sampled = array("i", result.ids)
        key = chain_key(above.key, ids_digest("response", sampled))
        node = self._form(new, above, key, ids=sampled, before=above.key, request_id=request_id)
        node.sample(result, num_aborts=num_aborts)
        return self._write(new)

    def add(self, node: Node) -> None:
        """Add a node that was formed, and let it be found. Nodes come in the order of their ids."""
        assert node.node_id == len(self.nodes), f"node {node.node_id} cannot come after {len(self.nodes)} others"
        self._index.add(node)
        self.nodes.append(node)
        if node.parent is not None:
            node.parent.children.append(node)
            if node.kind == "response":
                self._num_responses[node.parent.key if node.continues else node.before] += 1

    def _observation(
        self,
        new: list[Node],
        above: Node,
        key: bytes,
        messages: tuple[Message, ...],
        ids: array[int],
        request_id: str | None,
    ) -> Node:
        """The observation of these ids under a state: the one that is there already, else a new one."""
        for child in above.children:
            if child.kind == "observation" and child.key == key and child.ids == ids:
                return child
        return self._form(new, above, key, messages, ids=ids, request_id=request_id)

    def _form(
        self,
        new: list[Node],
        parent: Node | None,
        key: bytes,
        messages: tuple[Message, ...] = (),
        *,
        conversation: Conversation | None = None,
        ids: Sequence[int] = (),
        before: bytes = b"",
        request_id: str | None = None,
    ) -> Node:
        """A node that comes after those in `new`: a root, an observation, or with `before` a response."""
        kind = "root" if parent is None else "response" if before else "observation"
        node = Node(
            node_id=len(self.nodes) + len(new),
            parent=parent,
            key=key,
            kind=kind,
            messages=messages,
            conversation=parent.conversation if parent else conversation or Conversation(template_kwargs={}),
            ids=ids,
            request_id=request_id,
        )
        node.before = before
        new.append(node)
        return node

    def _write(self, new: list[Node]) -> Node:
        """Add all nodes of a turn. Forming them may fail, adding them cannot: a turn is written whole or not at all."""
        for node in new:
            self.add(node)
        return new[-1]
