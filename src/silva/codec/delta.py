"""What follows a sampled turn: everything up to the next one, as a function of the turn's kind and the new messages.

A delta is learned from small conversations: a short beginning, an assistant turn of the same kind, the new messages.
The render is cut where that assistant turn ends. The cut text has to be the same behind every beginning that the
template accepts, because only then it is right in any history. Example (ChatML), the delta of one user message:

    beginning  <|im_start|>user\\n [hole] <|im_end|>\\n <|im_start|>assistant\\n [hole of the answer]
               -- cut here --
    delta      <|im_end|>\\n<|im_start|>user\\n [slot: the new text] <|im_end|>\\n<|im_start|>assistant\\n

The first `<|im_end|>` closes the answer; it is left out where the model sampled it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from silva.codec.deltas import SampledTail, TurnDelta
from silva.codec.encoder import TokenText, common_prefix
from silva.codec.ends import TurnEnds
from silva.codec.frame import Frame, TextOf, lookup
from silva.codec.recipe import Recipe, learn_recipe
from silva.codec.root import CACHED_KEY_CHARS, DEPENDS_ON_TEXT, check_shown
from silva.codec.slots import CONTEXT, NEW, PLACEHOLDER, Hole, Slots, call_part, clean, hole_of, safe_id, text_part
from silva.codec.transforms import holes_of, parse
from silva.types import JsonObject, Message, TransitionRefused

Tree = list[JsonObject]


class ImpureTransition(TransitionRefused):
    """The template allows the step, but what it writes depends on the history. `what` describes how."""

    def __init__(self, what: str, *, field: str | None):
        super().__init__(f"{what}, so the turn cannot be continued token by token", field=field)
        self.what = what


@dataclass(frozen=True, slots=True)
class Form:
    """One way of giving the assistant turn to the template."""

    arguments_as_text: bool
    """Whether arguments are a string; else a mapping."""
    with_reasoning: bool
    """Whether the turn has its reasoning."""
    content: str
    """"text", "blank" or "absent"."""


class AnsweredTurn:
    """The assistant turn before a delta, with holes instead of what the model wrote. Call names are kept."""

    def __init__(self, frame: Frame, message: Message):
        self._frame = frame
        self.slots = Slots(CONTEXT)
        self.has_text = bool(message.content.strip()) or not message.tool_calls
        self.has_reasoning = bool(message.reasoning)
        nine = frame.style.nine_ids
        self._call_ids = [self.slots.shared(safe_id(call.id, nine), "id") for call in message.tool_calls]
        self._names = [self._name(call.name) for call in message.tool_calls]
        self.key = repr((self.has_text, self.has_reasoning, self._call_ids, self._names))
        self.named = len(self.slots.values)
        self.content = self.slots.new("", "context")
        self.reasoning = self.slots.new("", "context")
        self.arguments = [self.slots.new("", "context") for _ in message.tool_calls]

    def _name(self, name: str) -> str | Hole:
        if name and self._frame.words.plain(name):
            return name
        values = self._frame.slots.values
        if name in values:
            return Hole(0, values.index(name))
        return self.slots.shared(clean(name), "name") if name.strip() else name

    def forms(self) -> Iterator[Form]:
        """The ways to try, the usual one first."""
        absent = ("absent", "blank") if self._frame.style.empty_content is None else ("blank", "absent")
        contents = ("text",) if self.has_text else (*absent, "text")
        as_text = self._frame.style.arguments_as_text
        for with_reasoning in (True, False) if self.has_reasoning else (False,):
            for arguments_as_text in (as_text, not as_text) if self._call_ids else (as_text,):
                for content in contents:
                    yield Form(arguments_as_text, with_reasoning, content)

    def turn(self, form: Form) -> JsonObject:
        out: JsonObject = {"role": "assistant"}
        if form.with_reasoning:
            out["reasoning_content"] = out["thinking"] = self.reasoning
        if form.content != "absent":
            out["content"] = self.content if form.content == "text" else ""
        if self._call_ids:
            out["tool_calls"] = [
                call_part(call_id, name, hole if form.arguments_as_text else {"a": hole})
                for call_id, name, hole in zip(self._call_ids, self._names, self.arguments, strict=True)
            ]
        return out

    def texts(self, fillers: Sequence[str]) -> list[str]:
        """Texts for the holes of the context region: ids and names as they are, placeholders for the rest."""
        return [*self.slots.values[: self.named], *fillers[self.named :]]


@dataclass(frozen=True, slots=True)
class Step:
    """A sampled turn and the messages behind it, as shapes."""

    frame: Frame
    """What renders them."""
    ends: TurnEnds
    """How the template ends the sampled turn."""
    context: AnsweredTurn
    """The sampled turn; its slots also have the holes of the turns before it."""
    tree: Tree
    """The shapes of the new messages."""
    slots: Slots
    """The texts of the new messages."""

    @classmethod
    def of(cls, frame: Frame, ends: TurnEnds, context: AnsweredTurn, messages: Sequence[Message]) -> Step:
        slots = Slots(NEW)
        build = frame.builder(slots)
        slots.share_all(context.slots)  # a result has the hole of the call that it names
        return cls(frame, ends, context, [build.message(message) for message in messages], slots)

    @property
    def first_field(self) -> str | None:
        """The field path of an error that concerns the step as a whole."""
        return "messages[0]" if self.tree else None

    def proves(self, known: DeltaRecipe, context: Sequence[str]) -> bool:
        """Whether the template writes what `known` predicts for the real (inert) texts. `context` are those before."""
        inert = self.frame.inert_texts(context, self.slots.values)
        real = self.frame.render([*known.beginning, *self.tree], inert, gen=True, inert=True)
        return real.endswith(known.recipe.text(inert))

    def encode(self, known: DeltaRecipe, context: Sequence[str], tail: SampledTail) -> TurnDelta:
        """The ids, without what closes the turn where the model sampled it, or another token that means the same."""
        texts = self.frame.texts(context, self.slots.values)
        observation, opening = known.recipe.encode(self.frame.text, texts)
        ends, close = self.ends, known.close
        if tail.cut or tail.last_id not in ends.closers:
            return TurnDelta(observation_ids=observation, opening_ids=opening)
        if ends.opener and tail.last_id != close[0]:
            mismatch = tail.last_id in ends.markers
            return TurnDelta(observation_ids=observation, opening_ids=opening, marker_mismatch=mismatch)
        n = close.index(tail.last_id) + 1 if tail.last_id in close else len(close)
        return TurnDelta(observation_ids=observation[n:], opening_ids=opening[max(0, n - len(observation)) :])

    @property
    def only_field(self) -> str | None:
        """The field path of the only message; None where there are several."""
        return "messages[0]" if len(self.tree) == 1 else None


@dataclass(frozen=True, slots=True)
class DeltaRecipe:
    """A learned delta."""

    recipe: Recipe
    """Its text and ids."""
    beginning: Tree
    """The turns before the new messages with which it is proven each time."""
    fillers: tuple[str, ...]
    """A placeholder for each hole of the beginning."""
    close: tuple[int, ...]
    """The ids at its front that close the turn before."""
    prefixes: tuple[tuple[str, bool], ...]
    """Only in a survey: each beginning, and whether the render with the new messages still starts with it."""


def encode_delta(frame: Frame, ends: TurnEnds, tail: SampledTail, messages: Sequence[Message]) -> TurnDelta:
    """The delta, proven on the texts of these messages. TransitionRefused where the template does not allow it."""
    step = Step.of(frame, ends, AnsweredTurn(frame, tail.message), messages)
    key = f"{tail.has_system}{step.context.key}{step.tree!r}"
    known: DeltaRecipe | None = frame.deltas.get(key)
    for cached in (True, False):
        if known is None:
            known = _learn(frame, key, DeltaLearner(step, tail.has_system), cached)
        named = step.context.texts(known.fillers)
        if step.proves(known, named):
            break
        known = None  # the texts matter after all, or a transform was learned in too narrow surroundings
    else:
        raise TransitionRefused(DEPENDS_ON_TEXT, field=step.only_field)
    if len(key) <= CACHED_KEY_CHARS:
        frame.deltas.put(key, known)
    return step.encode(known, named, tail)


def _learn(frame: Frame, key: str, learner: DeltaLearner, cached: bool) -> DeltaRecipe:
    """Learn a delta. An impure step is remembered, so that it is learned only once."""
    impure: ImpureTransition | None = frame.impure.get(key)
    if impure is not None:
        raise ImpureTransition(impure.what, field=impure.field)
    try:
        return learner.learn(cached=cached)
    except ImpureTransition as error:
        if len(key) <= CACHED_KEY_CHARS:
            frame.impure.put(key, ImpureTransition(error.what, field=error.field))
        raise


class DeltaLearner:
    """Finds the recipe of one delta, or raises the reason why there is none.

    `survey` compares all beginnings and records whether the template rewrites earlier text.
    """

    def __init__(self, step: Step, has_system: bool | None, *, survey: bool = False):
        self._step = step
        self._frame = step.frame
        self._context = step.context
        self._tree = step.tree
        self._prefixes = small_beginnings(step.frame, step.context.slots, has_system)
        self._small = next(iter(self._prefixes.values()))
        self._survey = survey
        self._text = ""
        self._reason: TransitionRefused | None = None

    def learn(self, *, cached: bool = False) -> DeltaRecipe:
        for form in self._context.forms():
            turn = self._context.turn(form)
            for name, prefix in self._prefixes.items():
                tail = self._tail([*prefix, turn], form)
                if tail is not None:
                    return self._finish(form, name, turn, tail, cached)
        assert self._reason is not None
        raise self._located(self._reason)

    def _tail(self, beginning: Tree, form: Form) -> str | None:
        """The text behind the assistant turn, None (with the reason kept) where it cannot be had."""
        try:
            text = self._frame.render([*beginning, *self._tree], gen=True)
        except TransitionRefused as error:
            if self._reason is None or self._frame.try_render(beginning):
                self._reason = error
            return None
        self._text = text
        try:
            tail = self._cut(text, form, beginning)
            pieces = parse(tail)
            check_shown(pieces, self._tree, late_from=0, everywhere=text)
            self._frame.check_images(pieces, self._tree)
        except TransitionRefused as error:
            self._reason = error
            return None
        return tail

    def _located(self, error: TransitionRefused) -> TransitionRefused:
        """The same error with the first message that cannot follow, found by leaving out messages from the end."""
        if error.field is not None or not self._tree:
            return error
        for n in range(1, len(self._tree)):
            shorter = DeltaLearner(replace(self._step, tree=self._tree[:n]), None)
            shorter._prefixes = self._prefixes
            begins = (
                (form, [*prefix, self._context.turn(form)])
                for form in self._context.forms()
                for prefix in self._prefixes.values()
            )
            if all(shorter._tail(beginning, form) is None for form, beginning in begins):
                return error.at(f"messages[{n - 1}]")
        return error.at(f"messages[{len(self._tree) - 1}]")

    def _cut(self, text: str, form: Form, beginning: Tree) -> str:
        context = self._context
        shown = [text.rfind(hole.placeholder) for hole in context.arguments]
        content = text.rfind(context.content.placeholder) if form.content == "text" else -1
        if any(place < 0 for place in shown) and not (max(shown) < 0 <= content):
            raise TransitionRefused(
                "the chat template prints only some of an assistant turn's calls, so results cannot be matched to them"
                if max(shown) >= 0
                else "the chat template does not print an assistant turn's calls"
            )
        if form.content == "text" and content < 0 and not context.arguments:
            raise TransitionRefused("the chat template does not print the text of an assistant turn")
        reasoning = text.rfind(context.reasoning.placeholder) if form.with_reasoning else -1
        end = max([content, reasoning, *shown]) + len(context.content.placeholder)
        if self._step.ends.opener and not self._tree:  # nothing follows but the opening of the next turn
            alone = self._frame.render(beginning, gen=False)
            return text[len(alone) if text.startswith(alone) else end :]
        return text[self._close_place(text, end) :]

    def _close_place(self, text: str, end: int) -> int:
        limit = next(
            (m.start() for m in PLACEHOLDER.finditer(text, end) if hole_of(m.group(1)).region == NEW), len(text)
        )
        close = self._step.ends.pattern.search(text, end, limit)
        if close is not None:
            return close.start()
        pieces = self._frame.text.split(text[end:limit])
        head = pieces[0] if pieces and isinstance(pieces[0], str) else ""
        if not self._context.arguments and len(pieces) > bool(head) and not head.strip():
            return end + len(head)
        raise TransitionRefused(
            "the chat template writes no control token between an assistant turn and what follows, so the model cannot "
            "know where its turn ends"
        )

    def _finish(self, form: Form, name: str, turn: JsonObject, tail: str, cached: bool) -> DeltaRecipe:
        frame, prefix = self._frame, self._prefixes[name]
        prefixes = self._compare(form, turn, tail, known="" if self._survey else name)
        beginning = [*prefix, turn]
        whole = parse(tail)
        self._refuse_foreign(whole)
        self._refuse_tools_again(form, beginning, tail)
        kinds = lookup(frame.slots.kinds, self._context.slots.kinds, self._step.slots.kinds)

        def render(text_of: TextOf, gen: bool) -> str:
            return self._cut(frame.render([*beginning, *self._tree], text_of, gen=gen), form, beginning)

        recipe = learn_recipe(frame, whole, kinds, render, self._tree, cached=cached, first=False)
        close = self._closing(whole, form, turn)
        fillers = tuple(Hole(CONTEXT, i).placeholder for i in range(len(self._context.slots.values)))
        return DeltaRecipe(recipe, beginning, fillers, close, prefixes)

    def _closing(self, tail: Sequence[str | Hole], form: Form, turn: JsonObject) -> tuple[int, ...]:
        """The ids at the front of `tail` that close the assistant turn: those up to the last token that ends a turn.

        Mostly one. A template may close parts of a turn, and then the turn itself.
        """
        text, stops = self._frame.text, self._step.ends.stop_ids
        head = tail[0]
        assert isinstance(head, str)
        first = next(iter(text.split(head)), "")
        if isinstance(first, str):
            raise TransitionRefused("the chat template writes no control token at the start of the next turn")
        if self._step.ends.opener:
            return (first.id,)
        try:
            alone = self._cut(self._frame.render([*self._small, turn], gen=False), form, self._small)
        except TransitionRefused:
            return (first.id,)
        ids = text.encode(head[: common_prefix(head, alone)])
        last = max((i for i, token in enumerate(ids) if token in stops), default=0)
        return tuple(ids[: last + 1])

    def _compare(self, form: Form, turn: JsonObject, tail: str, known: str) -> tuple[tuple[str, bool], ...]:
        """Refuse the transition unless the tail is the same behind each beginning."""
        checked: list[tuple[str, bool]] = []
        for name, prefix in self._prefixes.items():
            if name == known:
                continue
            try:
                beginning = [*prefix, turn]
                text = self._frame.render([*beginning, *self._tree], gen=True)
                before = self._frame.render(prefix, gen=True) if self._survey else ""
                other = self._cut(text, form, beginning)
            except TransitionRefused:
                continue  # this beginning is none that the template allows
            if other != tail:
                raise ImpureTransition(
                    "the chat template writes what follows an assistant turn differently in other histories (behind "
                    f"{name!r})",
                    field=self._step.first_field,
                )
            checked.append((name, text.startswith(before)))
        return tuple(checked)

    def _refuse_foreign(self, pieces: Sequence[str | Hole]) -> None:
        named = self._context.named
        if any(hole.region == CONTEXT and hole.index >= named for hole in holes_of(pieces)):
            raise ImpureTransition(
                "the chat template repeats or moves the text of earlier messages into the new turn",
                field=self._step.first_field,
            )

    def _refuse_tools_again(self, form: Form, beginning: Tree, tail: str) -> None:
        """Refuse a tail that shows the tools again because the template moves them there from an earlier turn."""
        frame = self._frame
        if not frame.has_tools:
            return
        step = [*beginning, *self._tree]
        given = next(i for i, turn in enumerate(beginning) if turn["role"] == "assistant")
        try:
            bare = self._cut(frame.without_tools().render(step, gen=True), form, beginning)
            before = frame.render(step, gen=True).removesuffix(tail)
            first = frame.render(beginning[:given], gen=True)
        except TransitionRefused:
            return
        if bare != tail and only_moved(frame.text, tail, bare, given=first, before=before):
            raise ImpureTransition(
                "the chat template moves the tools from earlier turns into the new one, where they would appear twice",
                field=self._step.first_field,
            )


def only_moved(text: TokenText, full: str, bare: str, *, given: str, before: str) -> bool:
    """Whether `full` is `bare` plus only stretches that `given` contains and `before` no longer does."""
    old, new = _items(text, full), _items(text, bare)
    for op, start, stop, _, _ in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        moved = "".join(old[start:stop])
        if op != "equal" and (op != "delete" or moved not in given or moved in before):
            return False
    return True


def _items(text: TokenText, tail: str) -> list[str]:
    """A tail in control tokens, texts and placeholders."""
    out: list[str] = []
    for piece in parse(tail):
        if isinstance(piece, Hole):
            out.append(piece.placeholder)
        else:
            out += [item if isinstance(item, str) else item.text for item in text.split(piece)]
    return out


def small_beginnings(frame: Frame, slots: Slots, has_system: bool | None) -> dict[str, Tree]:
    """Beginnings to compare, by name: s(ystem), u(ser), a(ssistant), c(all), t(ool result), r(easoning answer), i(mage
    of a user)."""

    def turn(role: str) -> JsonObject:
        return {"role": role, "content": slots.new("", "context")}

    def thought() -> JsonObject:
        hole = slots.new("", "assistant.reasoning")
        return {**turn("assistant"), "reasoning_content": hole, "thinking": hole}

    def call() -> Tree:
        hole = slots.new("", "id")
        calling = frame.style.calling_turn(hole, frame.tool_name, slots.new("", "context"))
        return [calling, {**turn("tool"), "tool_call_id": hole}]

    user, system = turn("user"), turn("system")
    plain: dict[str, Tree] = {
        "u": [user],
        "uau": [user, turn("assistant"), turn("user")],
        "uctau": [user, *call(), turn("assistant"), turn("user")],
        "uru": [user, thought(), turn("user")],
        "uct": [user, *call()],
    }
    with_system: dict[str, Tree] = {
        "su": [system, user],
        "suau": [system, user, turn("assistant"), turn("user")],
        "suct": [system, user, *call()],
    }
    image = frame.image_part("user")
    if image is not None:
        shown: JsonObject = {"role": "user", "content": [image, text_part(slots.new("", "context"))]}
        plain["i"], with_system["si"] = [shown], [system, shown]
    if has_system is None:
        return {**plain, **with_system}
    return with_system if has_system else plain
