"""Images in a chat template: in which form it takes them, and what it writes for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from silva.codec.encoder import ControlToken, TokenText, common_prefix
from silva.codec.slots import Hole
from silva.types import JsonObject, TransitionRefused

IMAGE_PARTS: tuple[JsonObject, ...] = ({"type": "image"}, {"type": "image_url", "image_url": {"url": "image"}})
"""The forms to try. Each is a literal of a shape, so no address and no byte of an image ever reaches a template."""


@dataclass(frozen=True, slots=True)
class ImageForm:
    """How a template takes an image in messages of one role."""

    part: JsonObject
    """The content part that the template receives for an image."""
    mark: str
    """The text that the template writes for it."""


def mark_of(whole: str, without: str, text: TokenText) -> str | None:
    """What the first of two renders has more than the second, in one place, where a control token is in it."""
    num = len(whole) - len(without)
    at = common_prefix(whole, without)
    if num <= 0 or whole[at + num :] != without[at:]:
        return None
    mark = whole[at : at + num].strip()
    return mark if any(isinstance(item, ControlToken) for item in text.split(mark)) else None


def text_holes(content: object) -> list[Hole]:
    """The free texts of a message's content, in order."""
    if isinstance(content, Hole):
        return [content]
    parts = cast("list[JsonObject]", content) if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part.get("text"), Hole)]


def check_images(pieces: Sequence[str | Hole], tree: Sequence[JsonObject], forms: Mapping[str, ImageForm]) -> None:
    """Raise TransitionRefused unless the render `pieces` contains each image of the messages once."""
    expected: Counter[str] = Counter()
    last = 0
    for i, message in enumerate(tree):
        content = message.get("content")
        if isinstance(content, list):
            form = forms[message["role"]]
            num = sum(part == form.part for part in cast("list[JsonObject]", content))
            expected[form.mark] += num
            last = i if num else last
    for mark, num in expected.items():
        found = sum(piece.count(mark) for piece in pieces if isinstance(piece, str))
        if found != num:
            raise TransitionRefused(
                f"the chat template writes {found} of these messages' {num} images as it writes a single one, so the "
                "images cannot be matched to their marks",
                field=f"messages[{last}]",
            )
