"""What a forest should hold, kept in the plainest way: states in a dict of spelled-out histories."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from silva.forest.identity import canonical_arguments
from silva.forest.node import Node
from silva.forest.placement import Placement
from silva.types.messages import Message

History = tuple[Message, ...]
Spelled = tuple[object, ...]


def spell(message: Message) -> tuple[object, ...]:
    calls = tuple((call.id, call.name, canonical_arguments(call.arguments)) for call in message.tool_calls)
    return (message.role, message.content, message.reasoning, calls, message.tool_call_id)


@dataclass(kw_only=True, eq=False)
class State:
    """A committed state.

    `text` is everything up to its end, `said` what the model wrote since its last opening, `turn` the last sampled turn
    at or above it.
    """

    own: History
    text: str
    closed: bool
    turn: Turn | None
    is_turn: bool
    said: str = ""


@dataclass(kw_only=True, eq=False)
class Turn:
    request_id: str
    conversation: int
    request: History
    reply: Message
    state: State
    above: Turn | None
    input_ids: list[int]
    sampled: list[int]
    logprobs: list[float]
    versions: list[int]
    cut: bool
    node: Node
    is_continued: bool = False
    run: tuple[History, tuple[Message, ...]] = ((), ())
    """What stood before the answers that came without anything between them, and these as they were told."""

    def lineage(self) -> list[Turn]:
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.above
        return turns[::-1]


@dataclass(kw_only=True, eq=False)
class Pending:
    """A request that was matched and placed, and whose tokens have not come yet."""

    conversation: int
    request: History
    placement: Placement
    base: State | None
    own: History
    text: str
    continues: bool
    repaired: list[Spelling]


Spelling = tuple[History, State, dict[str, str], History | None]
"""A spelled history, the answer that it leads to and the names of calls in it. Where the answer itself is missing: what
the history really is."""


def is_lossy(rest: History, said: Message) -> bool:
    """Whether `rest` starts with an echo of `said` that lost blanks, the reasoning or the ids of the calls."""
    echo = rest[0]
    if echo.role != "assistant" or echo.content.strip() != said.content.strip():
        return False
    if echo.reasoning.strip() not in ("", said.reasoning.strip()):
        return False
    mine, given = ([(call.name, canonical_arguments(call.arguments)) for call in m.tool_calls] for m in (echo, said))
    ids, given_ids = ([call.id for call in m.tool_calls] for m in (echo, said))
    if mine != given or len(set(ids)) < len(ids):
        return False
    results = [message.tool_call_id for message in itertools.takewhile(lambda m: m.role == "tool", rest[1:])]
    return ids == given_ids or set(results) <= set(ids)


def says_nothing(said: Message) -> bool:
    """Whether nothing of an answer has to come back."""
    return not said.content.strip() and not said.tool_calls


@dataclass(kw_only=True)
class Reference:
    """States by conversation and spelled history. An alias gives way to a state that owns the same spelling."""

    states: dict[tuple[int, Spelled], State] = field(default_factory=dict)
    owned: set[tuple[int, Spelled]] = field(default_factory=set)
    names: dict[tuple[int, Spelled], dict[str, str]] = field(default_factory=dict)
    answers: dict[tuple[int, Spelled], list[tuple[Message, State]]] = field(default_factory=dict)
    whole: dict[tuple[int, Spelled], tuple[State, History]] = field(default_factory=dict)
    """Histories that lack an empty answer: that answer, and what they really are."""

    def resolve(
        self, conversation: int, history: History, lenient: bool = False
    ) -> tuple[State | None, int, History, list[Spelling]]:
        """The longest known prefix, its length, the history with that prefix as the state itself spells it, and the
        lossy echoes on the way. What is known as it stands goes first."""
        exact = self.walk(conversation, history, None)
        return self.walk(conversation, history, exact[1]) if lenient and exact[1] else exact

    def walk(
        self, conversation: int, history: History, repair_from: int | None
    ) -> tuple[State | None, int, History, list[Spelling]]:
        found: State | None = None
        length = 0
        own: History = ()
        names: dict[str, str] = {}
        repaired: list[Spelling] = []
        for index, message in enumerate(history):
            if message.role == "assistant":
                names = {}
            elif message.tool_call_id in names:
                message = replace(message, tool_call_id=names[message.tool_call_id])
            above, own = own, (*own, message)
            key = (conversation, tuple(spell(m) for m in own))
            state, gone = self.states.get(key), None
            if state is None and key in self.whole:
                gone, own = self.whole[key]
                names, state = {}, self.states.get((conversation, tuple(spell(m) for m in own)))
            elif state is not None and key not in self.owned:
                names = self.names.get(key, {})
            if state is None and repair_from is not None and index == length >= repair_from:
                answers = self.answers.get((conversation, tuple(spell(m) for m in above)), ())
                for said, answer in answers:
                    if is_lossy(history[index:], said):
                        state = answer
                        new = zip(message.tool_calls, said.tool_calls, strict=True)
                        names = {mine.id: given.id for mine, given in new if mine.id != given.id}
                    moves = says_nothing(said) and [*map(spell, answer.own)] != [*map(spell, above)]
                    if key not in self.whole and message.role in ("user", "system") and moves:
                        gone = self.states[conversation, tuple(spell(m) for m in answer.own)]
                if state is not None:
                    repaired.append(((*above, message), state, names, None))
                elif gone is not None:
                    found, own, names = gone, (*gone.own, message), {}
                    repaired.append(((*above, message), gone, {}, own))
                    state = self.states.get((conversation, tuple(spell(m) for m in own)))
            if state is not None:
                state = self.states[conversation, tuple(spell(m) for m in state.own)]
                found, length, own = state, index + 1, state.own
        return found, length, own, repaired

    def learn(self, conversation: int, repaired: list[Spelling]) -> None:
        for own, state, names, whole in repaired:
            key = (conversation, tuple(spell(m) for m in own))
            if whole is not None:
                if key not in self.states:
                    self.whole.setdefault(key, (state, whole))
            elif key not in self.states:
                self.states[key], self.names[key] = state, names

    def add(self, conversation: int, own: History, state: State, *, alias: bool = False) -> None:
        key = (conversation, tuple(spell(m) for m in own))
        if alias and key in self.owned:
            return
        self.states[key] = state
        self.names.pop(key, None)
        if not alias:
            self.owned.add(key)
            self.whole.pop(key, None)

    def answered(self, conversation: int, before: History, message: Message, state: State) -> None:
        self.answers.setdefault((conversation, tuple(spell(m) for m in before)), []).append((message, state))
