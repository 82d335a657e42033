"""The first observation of a conversation: a whole render in which every free text is a hole.

Example (ChatML), for the message `user: hi`:

    render      <|im_start|>user\\nZq7x...Z<|im_end|>\\n<|im_start|>assistant\\n
    skeleton    <|im_start|>user\\n [slot] <|im_end|>\\n<|im_start|>assistant\\n
    ids         observation of the text up to `<|im_end|>\\n`, opening of the rest, with "hi" in the slot
"""

from __future__ import annotations

from collections.abc import Sequence

from silva.codec.deltas import TurnDelta
from silva.codec.frame import Frame, Pieces, TextOf, lookup
from silva.codec.images import text_holes
from silva.codec.recipe import Recipe, learn_recipe
from silva.codec.slots import NEW, Hole, Slots, owner
from silva.codec.transforms import holes_of, parse
from silva.types import JsonObject, Message, TransitionRefused

CACHED_KEY_CHARS = 20_000
_MOST_TRIED = 64
DEPENDS_ON_TEXT = (
    "the chat template writes these messages differently depending on what their texts say, so their tokens cannot be "
    "separated from the template's own"
)


def encode_root(frame: Frame, messages: Sequence[Message]) -> TurnDelta:
    """Observation and opening ids of a conversation from its start."""
    build = frame.builder(Slots(NEW))
    tree = [build.message(message) for message in messages]
    slots = build.slots
    inert = frame.inert_texts((), slots.values)
    key = repr(tree)
    recipe: Recipe | None = frame.roots.get(key)
    if recipe is None:
        recipe = learn_root(frame, tree, slots, inert)
        if len(key) <= CACHED_KEY_CHARS:
            frame.roots.put(key, recipe)
    elif not _proven(frame, recipe, tree, inert):
        # the texts matter after all, or a transform was learned in too narrow surroundings
        recipe = learn_root(frame, tree, slots, inert)
    observation, opening = recipe.encode(frame.text, frame.texts((), slots.values))
    return TurnDelta(observation_ids=observation, opening_ids=opening)


def learn_root(frame: Frame, tree: Sequence[JsonObject], slots: Slots, inert: TextOf) -> Recipe:
    """The recipe of these messages, proven on their own (inert) texts."""
    try:
        whole = parse(frame.render(tree, gen=True))
    except TransitionRefused as error:
        raise error.at(error.field or _first_refused(frame, tree, str(error))) from error
    check_shown(whole, tree, late_from=1)
    frame.check_images(whole, tree)
    kinds = lookup(frame.slots.kinds, (), slots.kinds)

    def render(text_of: TextOf, gen: bool) -> str:
        return frame.render(tree, text_of, gen=gen)

    for cached in (True, False):
        recipe = learn_recipe(frame, whole, kinds, render, tree, cached=cached, first=True)
        if _proven(frame, recipe, tree, inert):
            return recipe
    raise TransitionRefused(DEPENDS_ON_TEXT, field=_first_difference(frame, recipe, tree, inert))


def _proven(frame: Frame, recipe: Recipe, tree: Sequence[JsonObject], inert: TextOf) -> bool:
    return frame.render(tree, inert, gen=True, inert=True) == recipe.text(inert)


def check_shown(pieces: Pieces, tree: Sequence[JsonObject], *, late_from: int, everywhere: str = "") -> None:
    """Raise TransitionRefused unless the render contains all user, tool and later system texts in their order.

    From message `late_from` on a system message counts as late: it has to stay in its place. `everywhere` is
    the whole render, where `pieces` are only its end.
    """
    places: dict[Hole, int] = {}
    for i, hole in enumerate(holes_of(pieces)):
        places.setdefault(hole, i)
    last = -1
    for i, message in enumerate(tree):
        late_system = message["role"] == "system" and i >= late_from
        if not (message["role"] in ("user", "tool") or late_system):
            continue
        what = "system message that comes after the start" if late_system else f"text of this {message['role']} turn"
        for hole in text_holes(message.get("content")):
            place = places.get(hole, -1)
            if place <= last:
                does = "drops" if place < 0 and hole.placeholder not in everywhere else "moves"
                raise TransitionRefused(f"the chat template {does} the {what}", field=f"messages[{i}]")
            last = place


def _first_refused(frame: Frame, tree: Sequence[JsonObject], words: str) -> str | None:
    """The path of the message up to which the template refuses in the same words."""
    for n in range(1, min(len(tree), _MOST_TRIED) + 1):
        try:
            frame.render(tree[:n], gen=True)
        except TransitionRefused as error:
            if str(error) == words:
                return f"messages[{n - 1}]"
    return None


def _first_difference(frame: Frame, recipe: Recipe, tree: Sequence[JsonObject], inert: TextOf) -> str | None:
    real = frame.render(tree, inert, gen=True, inert=True)
    at = 0
    for part in recipe.skeleton:
        text = part if isinstance(part, str) else part.transform.apply(inert(part.hole))
        if not real.startswith(text, at):
            return owner(tree, part.hole) if not isinstance(part, str) else None
        at += len(text)
    return None
