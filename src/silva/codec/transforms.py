"""What a chat template does to a text on its way into the render: trims it, writes it as JSON, or leaves it alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from silva.codec.slots import PLACEHOLDER, Hole, hole_of


@dataclass(frozen=True, slots=True)
class Transform:
    """What a template does to a text. Example: `Transform("lr").apply(" hi\\n")` is `"hi"`."""

    trim: str = ""
    """Which ends are trimmed: "", "l", "r" or "lr"."""
    chars: str | None = None
    """The characters to trim; None: all blanks."""
    quote: str = ""
    """How the text is written as JSON: "utf8", "ascii", or "" for not at all."""

    def apply(self, text: str) -> str:
        if "l" in self.trim:
            text = text.lstrip(self.chars)
        if "r" in self.trim:
            text = text.rstrip(self.chars)
        if self.quote:
            text = json.dumps(text, ensure_ascii=self.quote == "ascii")[1:-1]
        return text


TRANSFORMS = tuple(
    Transform(trim=trim, chars=chars, quote=quote)
    for quote in ("", "utf8", "ascii")
    for trim, chars in (("", None), ("l", "\n"), ("r", "\n"), ("lr", "\n"), ("l", None), ("r", None), ("lr", None))
)
"""Every treatment that is recognised, the gentlest first. Anything else counts as unknown, and is refused."""

IDENTITY = TRANSFORMS[0]


@dataclass(frozen=True, slots=True)
class TextSlot:
    """A place of a skeleton where the text of a hole goes, transformed."""

    hole: Hole
    """Where the text comes from."""
    transform: Transform = IDENTITY
    """What the template does to it."""


Skeleton = tuple["str | TextSlot", ...]


def parse(text: str) -> list[str | Hole]:
    """A render with placeholders as literals and holes, alternating, literals first and last."""
    pieces: list[str | Hole] = list(PLACEHOLDER.split(text))
    for i in range(1, len(pieces), 2):
        digits = pieces[i]
        assert isinstance(digits, str)
        pieces[i] = hole_of(digits)
    return pieces


def probes(hole: Hole) -> tuple[str, ...]:
    """Four texts around the hole's placeholder on which no two transforms agree."""
    mark = hole.placeholder
    return (
        f"\n\n \t{mark} \"q\" 'a' <&> \\ \\n é\t \n\n",
        f"\u00a0\u2003{mark}漢\r\n\u2003\u00a0",
        f"\n{mark}\tz\n",
        f"  {mark}/{{}}[] ",
    )


NUM_PROBES = len(probes(Hole(0, 0)))


def explain(pieces: Sequence[str | Hole], renders: Sequence[str], probed: set[Hole]) -> list[Transform] | Hole:
    """The transform of each hole of `pieces` in order, or the first hole that has no known one.

    `renders[k]` is the same render with the k-th probe in each hole of `probed`; the other holes keep their
    placeholders.
    """
    first, hole = pieces[0], pieces[1] if len(pieces) > 1 else Hole(0, 0)
    assert isinstance(first, str) and isinstance(hole, Hole)
    if not all(text.startswith(first) for text in renders):
        return hole
    at: list[int] = [len(first)] * len(renders)
    found: list[Transform] = []
    for i in range(1, len(pieces), 2):
        hole, literal = pieces[i], pieces[i + 1]
        assert isinstance(hole, Hole) and isinstance(literal, str)
        texts = probes(hole) if hole in probed else (hole.placeholder,) * len(renders)
        for transform in TRANSFORMS:
            filled = [transform.apply(text) + literal for text in texts]
            if all(text.startswith(f, a) for text, f, a in zip(renders, filled, at, strict=True)):
                found.append(transform)
                at = [a + len(f) for a, f in zip(at, filled, strict=True)]
                break
        else:
            return hole
    return found if all(a == len(text) for a, text in zip(at, renders, strict=True)) else hole


def skeleton(pieces: Sequence[str | Hole], transforms: Sequence[Transform]) -> Skeleton:
    """A parsed render with the transform of each hole, without empty literals."""
    slots = iter(transforms)
    return tuple(TextSlot(piece, next(slots)) if isinstance(piece, Hole) else piece for piece in pieces if piece)


def holes_of(pieces: Sequence[str | Hole]) -> list[Hole]:
    """The holes of a parsed render, in order."""
    return [piece for piece in pieces if isinstance(piece, Hole)]


def fill(skeleton: Skeleton, text_of: Callable[[Hole], str]) -> str:
    """The skeleton's text."""
    return "".join(part if isinstance(part, str) else part.transform.apply(text_of(part.hole)) for part in skeleton)
