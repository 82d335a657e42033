"""Explicit export: the committed state that a record, a whole history written by the agent, leads to.

A record has to end exactly at a state, so every reading of it is followed at once: the exact one, those in which an
answer lost something on its way (see `echo`), and all states that say the same where several do. Forests are only read.

Why this is not `SessionForest.match`: for one echo the request index returns one answer, the newest, and keeps one
state per key. A record needs all of them: two records whose echoes lack the reasoning may mean two answers that differ
only there, and must not share one. Records also pass places inside observations, which are no states. An index with
many values per key for both would make every request pay for what only records need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from silva.forest.echo import NOTHING, MessageAt, compare_echo
from silva.forest.identity import TOKEN_ROOT, chain_key, chain_keys, echo_digest, message_digest
from silva.forest.node import NO_RENAMES, Node, Renames, RepairKind
from silva.types import Conversation, Message

CleanFirst = Callable[[Message], Message]
"""Takes out of the first message of a history what is ignored when histories are compared."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How a history was read so far: the losses that were repaired, and the renamed calls that still count."""

    kinds: tuple[RepairKind, ...] = ()
    """Losses that were repaired."""
    renames: Renames = field(default_factory=lambda: NO_RENAMES)
    """Renamed calls that still count."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A state that a record may mean, and the losses that had to be repaired on the way to it."""

    node: Node
    """The state."""
    kinds: tuple[RepairKind, ...]
    """Losses that were repaired on the way to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What became of a record: its candidates, or how far it went.

    `places` are the keys that its first `depth` messages lead to; with all messages read and no candidate, none of them
    is a state with an answer.
    """

    depth: int
    """Messages that were read."""
    places: tuple[bytes, ...]
    """Keys that these messages lead to."""
    candidates: tuple[Candidate, ...] = ()
    """States that the whole record may mean; empty where no place is a state with an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The state that a record was given. `rivals` are the others that it could have meant as well."""

    node: Node
    """The state."""
    kinds: tuple[RepairKind, ...]
    """Losses that were repaired on the way to it."""
    rivals: tuple[Node, ...] = ()
    """Other states that it could have meant."""
    shared: bool = False
    """Another record has this state already, and there is no other."""


class ToldHistories:
    """Every history of a forest, message by message.

    Places between two messages have keys as states have; those inside of an observation are no states. All is read off
    the nodes, so that it does not matter in which order they came.
    """

    def __init__(self, nodes: Sequence[Node], clean_first: CleanFirst = lambda message: message):
        self.roots: dict[bytes, Conversation] = {}
        self.clean = clean_first
        self._states: dict[bytes, list[Node]] = {}
        self._inside: dict[bytes, tuple[Node, int]] = {}
        self._first: dict[bytes, dict[bytes, None]] = {}
        self._told: dict[bytes, dict[bytes, None]] = {}
        self._spoken: dict[bytes, dict[bytes, dict[tuple[Message, bytes, bool], None]]] = {}
        self._unsaid: dict[bytes, dict[bytes, None]] = {}
        self._after: dict[bytes, dict[tuple[Message, bytes], Node]] = {}
        self._num_answers: dict[int, int] = {}
        for node in nodes:
            if node.key != TOKEN_ROOT and (node.parent is None or node.messages):  # one of ids has no history to tell
                self._add(node)

    def states(self, key: bytes) -> Sequence[Node]:
        """The states with this key, oldest first; none for a place inside of an observation."""
        return self._states.get(key, ())

    def inside(self, key: bytes) -> tuple[Node, int] | None:
        """The observation that a place lies in, and how many of its messages stand before that place."""
        return self._inside.get(key)

    def after(self, key: bytes) -> list[tuple[Message, Node]]:
        """Each message that ever followed a place, with its state, oldest first."""
        return [(message, node) for (message, _), node in self._after.get(key, {}).items()]

    def num_answers(self, node: Node) -> int:
        """Answers of the model on the way to a state, its own included."""
        return self._num_answers[node.node_id]

    # -- building ---------------------------------------------------------------------------------------------------

    def _add(self, node: Node) -> None:
        self._states.setdefault(node.key, []).append(node)
        above = 0 if node.parent is None else self._num_answers[node.parent.node_id]
        self._num_answers[node.node_id] = above + (node.kind == "response")
        if node.parent is None:
            self.roots[node.key] = node.conversation
        elif node.kind == "observation":
            self._add_observation(node, node.parent)
        else:
            self._add_response(node, node.parent)

    def _add_observation(self, node: Node, parent: Node) -> None:
        digests = [message_digest(message) for message in node.messages]
        keys = chain_keys(parent.key, digests)
        if parent.kind == "root":
            cleaned = message_digest(self.clean(node.messages[0]))
            if keys[-1] != node.key:
                digests[0] = cleaned
                keys = chain_keys(parent.key, digests)
            self._first.setdefault(chain_key(parent.key, cleaned), {})[keys[0]] = None
        if keys[-1] != node.key:
            self._told.setdefault(keys[-1], {})[node.key] = None
            keys[-1] = node.key
        for at, (before, key, message) in enumerate(zip((parent.key, *keys), keys, node.messages, strict=False), 1):
            if at < len(keys):
                self._inside.setdefault(key, (node, at))
            self._after.setdefault(before, {}).setdefault((message, key), node)
            if message.role == "assistant":
                self._speak(before, message, key, sampled=False)

    def _add_response(self, node: Node, parent: Node) -> None:
        message, before = node.messages[0], node.before
        self._after.setdefault(before, {}).setdefault((message, node.key), node)
        self._speak(before, message, node.key, sampled=True)
        # The client receives the continuation of a cut turn after it, also where its words are those of the whole turn.
        if node.told is not None and (node.continues or node.told != message):
            self._speak(parent.key if node.continues else before, node.told, node.key, sampled=True)
        if parent.kind == "response" and (joined := node.joined()) is not None:
            self._speak(node.run()[0].before, joined, node.key, sampled=True)

    def _speak(self, before: bytes, message: Message, key: bytes, *, sampled: bool) -> None:
        """An assistant message that leads from one place to another, by these words or by an echo of them."""
        echo = echo_digest(message)
        self._spoken.setdefault(before, {}).setdefault(echo, {})[message, key, sampled] = None
        spelled = chain_key(before, message_digest(message))
        if spelled != key:
            self._told.setdefault(spelled, {})[key] = None
        if sampled and echo == NOTHING and key != before:
            self._unsaid.setdefault(before, {})[key] = None

    # -- reading ----------------------------------------------------------------------------------------------------

    def find(self, root: bytes, digests: Sequence[bytes], message_at: MessageAt, *, lenient: bool) -> Search:
        """Read a history of messages (one digest each) below a root. `message_at` forms those that are compared."""
        places: dict[bytes, Reading] = {root: Reading()} if root in self.roots else {}
        for index in range(len(digests)):
            found: dict[bytes, Reading] = {}
            for key, reading in places.items():
                for to, then in self._steps(key, reading, index, digests[index], message_at, lenient):
                    known = found.get(to)
                    if known is None or len(then.kinds) < len(known.kinds):
                        found[to] = then
            if not found:
                return Search(depth=index, places=tuple(places))
            places = found
        candidates = [
            Candidate(node, reading.kinds)
            for key, reading in places.items()
            for node in self.states(key)
            if self.num_answers(node)
        ]
        return Search(depth=len(digests), places=tuple(places), candidates=tuple(candidates))

    def _steps(
        self, key: bytes, reading: Reading, index: int, digest: bytes, message_at: MessageAt, lenient: bool
    ) -> Iterator[tuple[bytes, Reading]]:
        """The places that the next message may lead to from this one."""
        renames = reading.renames
        if index == 0:
            first = message_digest(self.clean(message_at(0)))
            for to in self._first.get(chain_key(key, first), ()):
                yield to, reading
            return
        if renames:
            message = message_at(index)
            result_id = renames.get(message.tool_call_id or "")
            if message.role == "assistant":
                renames = NO_RENAMES
            elif result_id is not None:
                digest = message_digest(replace(message, tool_call_id=result_id))
        spelled = chain_key(key, digest)
        known = spelled in self._states or spelled in self._inside
        if known:
            yield spelled, Reading(reading.kinds, renames)
        for to in self._told.get(spelled, ()):
            yield to, Reading(reading.kinds, renames)
        # Only where there is a choice can another reading end elsewhere: most messages need not be formed.
        if lenient and not (known and len(self._after.get(key, ())) == 1 and key not in self._unsaid):
            yield from self._lossy_steps(key, reading, digest, message_at(index))

    def _lossy_steps(
        self, key: bytes, reading: Reading, digest: bytes, message: Message
    ) -> Iterator[tuple[bytes, Reading]]:
        if message.role == "assistant" and key in self._spoken:
            for said, to, sampled in self._spoken[key].get(echo_digest(message), ()):
                repair = compare_echo(message, said)
                if repair is not None and repair.kinds:
                    yield to, Reading((*reading.kinds, *repair.kinds), repair.renames)
                elif repair is None and not sampled and (repair := compare_echo(said, message)) is not None:
                    # What the model read here was itself an echo, and the record has what it lost.
                    renames = {given: told for told, given in repair.renames.items()}
                    yield to, Reading((*reading.kinds, *repair.kinds), renames)
        elif message.role in ("user", "system"):
            for answer in self._unsaid.get(key, ()):
                to = chain_key(answer, digest)
                if to in self._states or to in self._inside:
                    yield to, Reading((*reading.kinds, "answer_missing"))


def choose(found: Sequence[Sequence[Candidate]]) -> list[Choice]:
    """One state for each record, of one or more candidates each.

    A state that no other record took goes first, then one that was read exactly, then one that something followed, then
    the newest. Records with one candidate choose before the others do.
    """
    taken: set[int] = set()
    chosen: dict[int, Choice] = {}
    for at in sorted(range(len(found)), key=lambda at: len(found[at]) > 1):

        def rank(candidate: Candidate) -> tuple[bool, bool, bool, int]:
            node = candidate.node
            return node.node_id not in taken, not candidate.kinds, bool(node.children), node.node_id

        best = max(found[at], key=rank)
        rivals = [other.node for other in found[at] if other is not best and (best.kinds or not other.kinds)]
        shared = best.node.node_id in taken
        chosen[at] = Choice(node=best.node, kinds=best.kinds, rivals=tuple(rivals), shared=shared)
        taken.add(best.node.node_id)
    return [chosen[at] for at in range(len(found))]
