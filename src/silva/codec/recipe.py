"""A learned render, ready to be filled: the skeleton's text, and the programs that give its token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from silva.codec.encoder import ControlToken, Part, Program, TokenText, common_prefix
from silva.codec.frame import Frame, TextOf
from silva.codec.transforms import Skeleton, fill

Items = Sequence["Part | ControlToken"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """`observation` and `opening` give the two halves of a turn where they meet at a control token.

    Where they do not, `whole` and `without` (the render with and without generation prompt) are encoded in full, and
    the ids that both start with are the observation.
    """

    skeleton: Skeleton
    observation: Program
    opening: Program
    whole: Program | None = None
    without: Program | None = None

    def text(self, text_of: TextOf) -> str:
        return fill(self.skeleton, text_of)

    def encode(self, text: TokenText, text_of: TextOf) -> tuple[list[int], list[int]]:
        """Observation ids and opening ids."""
        if self.whole is None or self.without is None:
            return text.run(self.observation, text_of), text.run(self.opening, text_of)
        ids = text.run(self.whole, text_of)
        n = common_prefix(ids, text.run(self.without, text_of))
        return ids[:n], ids[n:]


def make_recipe(frame: Frame, with_prompt: Skeleton, without_prompt: Skeleton, *, first: bool) -> Recipe:
    """The recipe of a render with generation prompt and of the same without. `first`: they start the sequence."""
    whole, without = frame.items(with_prompt), frame.items(without_prompt)
    n = 0
    while n < min(len(whole), len(without)) and whole[n] == without[n]:
        n += 1
    compiled = frame.text.compile
    if _starts_clean(whole[n:]) and _starts_clean(without[n:]):
        return Recipe(with_prompt, compiled(whole[:n], first=first), compiled(whole[n:], first=False))
    return Recipe(with_prompt, (), (), whole=compiled(whole, first=first), without=compiled(without, first=first))


def _starts_clean(items: Items) -> bool:
    """Nothing follows, or a control token that leaves the text before it alone."""
    return not items or (isinstance(items[0], ControlToken) and not items[0].eats_left)
