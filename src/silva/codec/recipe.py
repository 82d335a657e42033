"""A learned render, ready to be filled: the skeleton's text, and the programs that give its token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from silva.codec.encoder import ControlToken, Part, Program, TokenText, common_prefix
from silva.codec.frame import Frame, Pieces, TextOf, placeholder
from silva.codec.transforms import Skeleton, fill, parse, skeleton
from silva.types import JsonObject

Items = Sequence["Part | ControlToken"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A learned render.

    Where observation and opening meet at a control token, each has its own program. Elsewhere the renders with and
    without generation prompt are encoded in full, and the ids that both start with are the observation.
    """

    skeleton: Skeleton
    """The render with generation prompt, with slots for the texts."""
    observation: Program
    """Gives the observation ids; empty where `whole` is set."""
    opening: Program
    """Gives the opening ids; empty where `whole` is set."""
    whole: Program | None = None
    """Gives all ids with generation prompt; None where the halves are encoded apart."""
    without: Program | None = None
    """Gives all ids without generation prompt; None where the halves are encoded apart."""

    def text(self, text_of: TextOf) -> str:
        return fill(self.skeleton, text_of)

    def encode(self, text: TokenText, text_of: TextOf) -> tuple[list[int], list[int]]:
        """Observation ids and opening ids."""
        if self.whole is None or self.without is None:
            return text.run(self.observation, text_of), text.run(self.opening, text_of)
        ids = text.run(self.whole, text_of)
        n = common_prefix(ids, text.run(self.without, text_of))
        return ids[:n], ids[n:]


def learn_recipe(
    frame: Frame,
    whole: Pieces,
    kinds: TextOf,
    render: Callable[[TextOf, bool], str],
    tree: Sequence[JsonObject],
    *,
    cached: bool,
    first: bool,
) -> Recipe:
    """The recipe of `render`, whose text with generation prompt is `whole`.

    `render` takes the texts of the holes and whether it writes the generation prompt. `cached` as in `Frame.learn`.
    `first`: the render starts the sequence.
    """
    found = frame.learn(whole, kinds, lambda text_of: render(text_of, True), tree, cached=cached)
    without = parse(render(placeholder, False))
    plain = found
    if whole[1::2] != without[1::2]:  # other holes, or in another order
        plain = frame.learn(without, kinds, lambda text_of: render(text_of, False), tree, cached=False)
    return make_recipe(frame, skeleton(whole, found), skeleton(without, plain), first=first)


def make_recipe(frame: Frame, with_prompt: Skeleton, without_prompt: Skeleton, *, first: bool) -> Recipe:
    """The recipe of a render with generation prompt and of the same without. `first`: they start the sequence."""
    whole, without = frame.items(with_prompt), frame.items(without_prompt)
    n = common_prefix(whole, without)
    compiled = frame.text.compile
    if _starts_clean(whole[n:]) and _starts_clean(without[n:]):
        return Recipe(with_prompt, compiled(whole[:n], first=first), compiled(whole[n:], first=False))
    return Recipe(with_prompt, (), (), whole=compiled(whole, first=first), without=compiled(without, first=first))


def _starts_clean(items: Items) -> bool:
    """Nothing follows, or a control token that leaves the text before it alone."""
    return not items or (isinstance(items[0], ControlToken) and not items[0].eats_left)
