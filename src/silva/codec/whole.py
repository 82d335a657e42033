"""The second way to a delta: render the history itself, for steps that a template writes differently in each history.

Some templates number tool results through the chat, write a second run of results differently from the first, or show
tools and system text in the last user turn. We render the lineage's messages with holes, cut the render where the
sampled turn ends, and encode only what comes behind the cut:

    render   user [hole] | result 1: [hole] | answer [hole] <|end|> || result 2: [slot] ...
             before the cut: must equal a render of the history     || the delta

Two conditions must be met. The text before the cut equals a render of the history alone; otherwise the new turn would
fit a text that the model never read. And the new turn contains no text of an earlier one: what a template shows again
is left out, because it stays where the model saw it first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from silva.codec.delta import AnsweredTurn, DeltaLearner, DeltaRecipe, Form, ImpureTransition, Step, Tree, only_moved
from silva.codec.deltas import Past, SampledTail, TurnDelta
from silva.codec.ends import TurnEnds
from silva.codec.frame import Frame
from silva.codec.late_system import encode_late_system
from silva.codec.root import DEPENDS_ON_TEXT
from silva.codec.slots import CONTEXT, Hole, materialise
from silva.codec.transforms import holes_of, parse
from silva.types import JsonObject, Message, TransitionRefused

_HISTORY = "the history"
_REASONING = "\x00reasoning\x00"


@dataclass(frozen=True, slots=True)
class History:
    """The turns before the sampled one as a shape."""

    tree: Tree
    """The shapes of the turns."""
    num_given: int
    """How many of them, from the first, were there before any turn was sampled."""
    spoken: frozenset[Hole]
    """The holes of assistant turns."""

    @property
    def has_system(self) -> bool:
        return bool(self.tree) and self.tree[0]["role"] == "system"

    def without_system(self) -> History:
        return History(self.tree[1:], self.num_given - 1, self.spoken) if self.has_system else self


def encode_whole(
    frame: Frame,
    ends: TurnEnds,
    tail: SampledTail,
    past: Past,
    messages: Sequence[Message],
    refused: TransitionRefused,
) -> TurnDelta:
    """The delta behind this very history. `refused` is why it could not be had without it.

    TransitionRefused where it cannot be had with it either.
    """

    def encode(before: Sequence[Message]) -> TurnDelta:
        return _encode(frame, ends, tail, replace(past, messages=tuple(before)), messages)

    try:
        return encode_late_system(past.messages, 1, encode)
    except TransitionRefused as error:
        if isinstance(refused, ImpureTransition):
            raise
        raise refused from error


def _encode(frame: Frame, ends: TurnEnds, tail: SampledTail, past: Past, messages: Sequence[Message]) -> TurnDelta:
    context = AnsweredTurn(frame, tail.message)
    build = frame.builder(context.slots)
    history = history_of([build.message(message) for message in past.messages], past.num_given)
    step = Step.of(frame, ends, context, messages)
    shape = repr((context.key, history.num_given, history.tree, step.tree))
    key = hashlib.blake2b(shape.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    found: Found | None = frame.wholes.get(key)
    if found is None or not found.proven_by(step):
        found = learn_whole(step, history)
        frame.wholes.put(key, found)
    return step.encode(found.known, _texts(context), tail)


def history_of(tree: Tree, num_given: int | None = None) -> History:
    """A history from its shape. `num_given` None: nothing but its first turns, up to an answer, was given."""
    if num_given is None:
        num_given = next((i for i, turn in enumerate(tree) if turn["role"] == "assistant"), len(tree))
    spoken: set[Hole] = set()

    def note(hole: Hole) -> str:
        spoken.add(hole)
        return ""

    materialise([turn for turn in tree if turn["role"] == "assistant"], note)
    return History(tree, num_given, frozenset(spoken))


def _texts(context: AnsweredTurn) -> list[str]:
    """Texts for the holes before the new messages."""
    return [value or Hole(CONTEXT, i).placeholder for i, value in enumerate(context.slots.values)]


@dataclass(frozen=True, slots=True)
class Found:
    """A recipe that is right behind histories of one shape only."""

    known: DeltaRecipe
    """The delta behind that shape."""
    frame: Frame
    """What it was rendered with: the conversation's frame, or the same without tools."""

    def proven_by(self, step: Step) -> bool:
        """Whether the template writes the same for the real (inert) texts."""
        return replace(step, frame=self.frame).proves(self.known, _texts(step.context))


def learn_whole(step: Step, history: History) -> Found:
    """Learn a delta behind a history, proven on the real (inert) texts of both."""
    learner = Whole(step, history)
    try:
        return learner.proven()
    except TransitionRefused as error:
        for shorter in learner.first_seen():
            try:
                found = shorter.proven()
            except TransitionRefused:
                continue
            if shorter.left_out_was_seen(learner):
                return found
        raise error


class Whole(DeltaLearner):
    """Learns a delta behind one given history."""

    def __init__(self, step: Step, history: History):
        super().__init__(step, None)
        self._prefixes = {_HISTORY: history.tree}
        self._history = history
        self._cut_text = ""

    def proven(self) -> Found:
        for cached in (True, False):
            found = Found(self.learn(cached=cached), self._frame)
            if found.proven_by(self._step):
                return found
        raise TransitionRefused(DEPENDS_ON_TEXT, field=self._step.only_field)

    def _compare(self, form: Form, turn: JsonObject, tail: str, known: str) -> tuple[tuple[str, bool], ...]:
        """Refuse the step unless the render still contains the history as the model read it."""
        self._cut_text = tail
        before = self._text[: len(self._text) - len(tail)]
        read = self._frame.render(self._history.tree, gen=True)
        fault = None if before.startswith(read) else self._difference(read, before)
        if fault is not None:
            raise ImpureTransition(
                f"the chat template {fault}, and what it writes next depends on the history",
                field=self._step.first_field,
            )
        return ()

    def _difference(self, read: str, before: str) -> str | None:
        """How the history in `before` differs from that in `read`; None where all that counts is the same.

        What leads into an assistant turn (an opening, or the close of a group of results) was given to the model with
        that turn and may change, and so may reasoning.
        """
        old, new = self._gaps(read), self._gaps(before)
        spoken = set(self._history.spoken)
        for i, (gap, hole) in enumerate(old[:-1]):
            other, found = new[i] if i < len(new) - 1 else ("", None)
            if found != hole:
                moved = hole.placeholder in self._cut_text
                return f"{'moves' if moved else 'drops'} the text of an earlier {self._role(hole)}"
            thought = _REASONING in gap or _REASONING in other
            if other != gap and not thought and hole not in spoken:
                return f"rewrites what comes before the text of an earlier {self._role(hole)}"
            spoken.discard(hole)  # a result may show the id of its call again
        return None

    def _gaps(self, text: str) -> list[tuple[str, Hole]]:
        """The text before each hole that is no reasoning; last, the text behind them all."""
        gaps: list[tuple[str, Hole]] = []
        gap = ""
        for piece in parse(text):
            if isinstance(piece, str):
                gap += piece
            elif piece.region == CONTEXT and self._context.slots.kinds[piece.index] == "assistant.reasoning":
                gap += _REASONING
            else:
                gaps.append((gap, piece))
                gap = ""
        return [*gaps, (gap, Hole(CONTEXT, 0))]

    def _role(self, hole: Hole) -> str:
        mark = repr(hole)
        return next((f"{turn['role']} turn" for turn in self._history.tree if mark in repr(turn)), "definition")

    def _refuse_tools_again(self, form: Form, beginning: Tree, tail: str) -> None:
        """Nothing to do: tools that moved are found by comparing the history."""

    def _refuse_foreign(self, pieces: Sequence[str | Hole]) -> None:
        kinds = self._context.slots.kinds
        if any(hole.region == CONTEXT and kinds[hole.index] not in ("id", "name") for hole in holes_of(pieces)):
            super()._refuse_foreign(pieces)

    def first_seen(self) -> Iterator[Whole]:
        """The same step with less to show again: without the tools, without the system text, without both."""
        frame, history = self._frame, self._history
        frames = (frame, frame.without_tools()) if frame.has_tools else (frame,)
        histories = (history, history.without_system()) if history.has_system else (history,)
        for kept in histories:
            for shown in frames:
                if shown is not frame or kept is not history:
                    yield Whole(replace(self._step, frame=shown), kept)

    def left_out_was_seen(self, full: Whole) -> bool:
        """Whether `full` writes the same plus only what its history began with and what it has moved here."""
        if not full._cut_text:
            return False
        before = full._text[: len(full._text) - len(full._cut_text)]
        given = full._frame.render(full._history.tree[: full._history.num_given], gen=True)
        return only_moved(self._frame.text, full._cut_text, self._cut_text, given=given, before=before)
