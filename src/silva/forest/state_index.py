"""Finds the state that a history of messages leads to.

A state has one key of its own, and other spellings may lead to it: the answer as its protocol showed it, answers in a
row merged into one, and echoes that lost something.

    history            u1      a1 (reasoning dropped)   u2
    key as spelled     k1      x                        chain(x, u2)
    key that counts    k1  ->  k(a1)                ->  chain(k(a1), u2)

Each request repeats the history of the one before, so the keys of the last history under each root are remembered (the
memo) and only what is new is hashed. A memo is valid while each of its keys still leads to the same state. It is cut
where a key gets a new meaning: at a spelling that was no state before (`_forget`), or altogether where a key that led
to one state leads to another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from silva.forest.echo import EchoIndex, MessageAt
from silva.forest.identity import chain_key, message_digest
from silva.forest.node import NO_RENAMES, EchoAlias, Node, Renames

MAX_SPELLINGS = 32
"""Most lossy spellings that are remembered of a state, because a client may use new call ids in each request."""


@dataclass(kw_only=True, slots=True)
class Chain:
    """A history read message by message."""

    digests: list[bytes] = field(default_factory=list[bytes])
    """Digest of each message."""
    keys: list[bytes] = field(default_factory=list[bytes])
    """Key of the place after each message."""
    renames: list[Renames] = field(default_factory=list[Renames])
    """After each message, the renamed calls that still count."""
    result_ids: list[str | None] = field(default_factory=list["str | None"])
    """For a tool result under a renamed id the id that it refers to; None for every other message."""

    def first(self, length: int, digests: list[bytes]) -> Chain:
        """A chain for these digests that knows the first `length` steps of this one."""
        return Chain(
            digests=digests,
            keys=self.keys[:length],
            renames=self.renames[:length],
            result_ids=self.result_ids[:length],
        )


class StateIndex:
    """The states of one session by key and by every spelling."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, Node] = {}
        self._memos: dict[bytes, Chain] = {}
        self._echoes = EchoIndex()
        self._renames: dict[bytes, Renames] = {}
        self._num_spellings: Counter[bytes] = Counter()
        self._unsaid: dict[bytes, tuple[Node, bytes]] = {}
        """A history that lacks an empty answer -> that answer, and the key of the whole history."""

    def node_of(self, key: bytes) -> Node | None:
        """The state with this key or spelling, the newest of several."""
        return self._by_key.get(key)

    def is_known(self, spelled: bytes) -> bool:
        """Whether a history that is spelled like this needs no repair."""
        return spelled in self._by_key or spelled in self._unsaid

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(
        self, root: bytes, digests: list[bytes], message_at: MessageAt | None, *, lenient: bool
    ) -> tuple[Chain, int, Node | None, list[EchoAlias]]:
        """A history below a root, the number of its messages that lead to a state, that state, and the repairs."""
        chain = self._chain(root, digests, message_at)
        parent, num_matched = self._by_key.get(root), 0
        for length in range(len(chain.keys), 0, -1):
            node = self._by_key.get(chain.keys[length - 1])
            if node is not None:
                parent, num_matched = node, length
                break
        aliases: list[EchoAlias] = []
        if lenient and message_at is not None and parent is not None and num_matched:
            chain, num_matched, parent = self._repair(chain, num_matched, parent, message_at, aliases)
        return chain, num_matched, parent, aliases

    def _chain(self, root: bytes, digests: list[bytes], message_at: MessageAt | None) -> Chain:
        """Keys after each message. A key that is an alias of a state goes on as that state's own key."""
        old = self._memos.get(root, Chain())
        known = len(old.digests)
        if old.digests != digests[:known]:
            known = _common_prefix(old.digests, digests)
        chain = old.first(known, digests)
        for index in range(known, len(digests)):
            self._step(root, chain, index, message_at)
        self._memos[root] = chain
        return chain

    def _step(self, root: bytes, chain: Chain, index: int, message_at: MessageAt | None) -> bytes:
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
        self, exact: Chain, length: int, parent: Node, message_at: MessageAt, aliases: list[EchoAlias]
    ) -> tuple[Chain, int, Node]:
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

    # -- writing ----------------------------------------------------------------------------------------------------

    def add(self, node: Node) -> None:
        """Let a new node be found. Of its spellings only those that were new are kept."""
        node.spellings = tuple(alias for alias in node.spellings if self._spelling(alias))
        holder = self._by_key.get(node.key)
        if (holder is not None and holder.key != node.key) or self._unsaid.pop(node.key, None) is not None:
            self._memos.clear()
        self._by_key[node.key] = node
        if node.kind == "response" and node.messages:
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
        if self.is_known(alias.key):
            return False
        if alias.beyond is not None:
            self._unsaid[alias.key] = (alias.node, alias.beyond)
            self._forget(alias.key)
            return True
        if self._num_spellings[alias.node.key] == MAX_SPELLINGS:
            return False
        self._num_spellings[alias.node.key] += 1
        self._alias(alias.key, alias.node)
        self._renames[alias.key] = alias.repair.renames
        return True


def _common_prefix(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
