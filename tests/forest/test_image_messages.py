"""Messages with images: one canonical form, and an identity that tells texts, images and their order apart."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.forest.identity import message_digest
from silva.types.messages import Image, Message, Part, join_texts, text_of

IMAGES = st.sampled_from([Image(digest="0" * 64), Image(digest="1" * 64), Image(digest="2" * 64, url="https://a/b")])
PARTS = st.lists(st.one_of(st.text(max_size=3), IMAGES), max_size=6)


def message(parts: list[Part]) -> Message:
    return Message(role="user", content=text_of(parts), parts=join_texts(parts))


def pieces(parts: list[Part]) -> list[Any]:
    """Single characters and images, in order: what the parts say, however they are cut."""
    return [piece for part in parts for piece in (part if isinstance(part, str) else [part.digest])]


@given(PARTS, PARTS)
def test_two_contents_are_the_same_exactly_when_they_say_the_same(left: list[Part], right: list[Part]) -> None:
    same = pieces(left) == pieces(right)
    assert (message(left) == message(right)) == same
    assert (message_digest(message(left)) == message_digest(message(right))) == same


@given(PARTS)
def test_a_content_without_images_is_a_text(parts: list[Part]) -> None:
    texts = [part for part in parts if isinstance(part, str)]
    assert message(list(texts)) == Message(role="user", content="".join(texts))
    made = message(parts)
    assert len(made.images) == len(parts) - len(texts)
    assert isinstance(made.to_chat()["content"], list) == bool(made.images)


@pytest.mark.parametrize(
    "fields",
    [
        {"role": "assistant", "parts": (Image(digest="0" * 64),)},
        {"role": "user", "content": "a", "parts": ("a",)},
        {"role": "user", "content": "b", "parts": ("a", Image(digest="0" * 64))},
    ],
)
def test_parts_that_contradict_their_message_cannot_be(fields: Any) -> None:
    with pytest.raises(ValueError, match="the parts of"):
        Message(**fields)
