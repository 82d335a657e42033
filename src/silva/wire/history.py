"""What a session sent and got before, so that an unchanged history is not read again and a named item is found."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from silva.forest import MessagesBetween, message_digest
from silva.types import Conversation, Message

K = TypeVar("K")
V = TypeVar("V")
KnownConversation = tuple[Conversation, tuple[str, ...]]
"""A conversation, and the names of its tools that were skipped."""
MAX_PLAIN_BYTES = 96
MAX_ENTRIES = 1 << 15
MAX_ITEMS = 1 << 13
MAX_MESSAGES_AN_ITEM = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PastMessages:
    """A request's history in canonical form."""

    digests: list[bytes]
    """One per canonical message."""
    messages_between: MessagesBetween
    """Forms the messages from one index to another."""
    item_of: Callable[[int], int]
    """Index of the raw item that a canonical message came from."""


class HistoryCache:
    """Raw JSON bytes of an item -> digests of its canonical messages; one cache per session and protocol.

    Of what the client sent it keeps only hashes, never long text; of what the client got it keeps items by their id
    (their texts are shared with the committed turns). When either is full, its older half is dropped.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES, max_items: int = MAX_ITEMS):
        self._digests: dict[bytes, tuple[bytes, ...]] = {}
        self._items: dict[str, Message] = {}
        self._max_entries = max_entries
        self._max_items = max_items
        self._conversation: tuple[bytes, KnownConversation] | None = None

    @staticmethod
    def key(raw: msgspec.Raw) -> bytes:
        """A short name for raw bytes: the bytes themselves, or their hash where they are long."""
        data = memoryview(raw)
        if len(data) <= MAX_PLAIN_BYTES:
            return bytes(data)
        return b"#" + hashlib.blake2b(data, digest_size=16).digest()

    def read(
        self, count: int, key_of: Callable[[int], bytes], project: Callable[[int], Message]
    ) -> tuple[list[bytes], MessagesBetween]:
        """Digests of `count` messages, and a way to their canonical forms. Projects those that were never seen."""
        past = self.read_items(count, key_of, lambda index: (project(index),))
        return past.digests, past.messages_between

    def read_items(
        self, count: int, key_of: Callable[[int], bytes], project: Callable[[int], tuple[Message, ...]]
    ) -> PastMessages:
        """As `read`, for raw items that are one or more messages each."""
        digests: list[bytes] = []
        starts: list[int] = []
        known: dict[int, tuple[Message, ...]] = {}
        for index in range(count):
            key = key_of(index)
            found = self._digests.get(key)
            if found is None:
                messages = known[index] = project(index)
                found = tuple(message_digest(message) for message in messages)
                if len(found) <= MAX_MESSAGES_AN_ITEM:  # entries are to be small; such an item is read again each time
                    _make_room(self._digests, self._max_entries)
                    self._digests[key] = found
            starts.append(len(digests))
            digests.extend(found)

        def item_of(at: int) -> int:
            return bisect_right(starts, at) - 1

        def messages_between(start: int, stop: int) -> tuple[Message, ...]:
            if start >= stop:
                return ()
            first, last = item_of(start), item_of(stop - 1)
            for index in range(first, last + 1):
                if index not in known:
                    known[index] = project(index)
            if first == last:  # no copy: one item may be very many messages
                return known[first][start - starts[first] : stop - starts[first]]
            messages = tuple(message for index in range(first, last + 1) for message in known[index])
            return messages[start - starts[first] : stop - starts[first]]

        return PastMessages(digests=digests, messages_between=messages_between, item_of=item_of)

    def keep_item(self, item_id: str, part: Message) -> None:
        """Remember a part of an assistant message that the client got under this id."""
        _make_room(self._items, self._max_items)
        self._items[item_id] = part

    def item(self, item_id: str) -> Message | None:
        return self._items.get(item_id)

    def __len__(self) -> int:
        return len(self._digests)

    @staticmethod
    def conversation_key(*raws: msgspec.Raw | None) -> bytes:
        """A short name for the raw tools and template arguments of a request."""
        digest = hashlib.blake2b(digest_size=16)
        for raw in raws:
            data = b"" if raw is None else memoryview(raw)
            digest.update(len(data).to_bytes(8, "big"))
            digest.update(data)
        return digest.digest()

    def conversation(
        self, raws: tuple[msgspec.Raw | None, ...], read: Callable[[], KnownConversation]
    ) -> KnownConversation:
        """The conversation of the raw tools and template arguments, as the last request had it, else as `read`."""
        key = self.conversation_key(*raws)
        if self._conversation is None or self._conversation[0] != key:
            self._conversation = (key, read())
        return self._conversation[1]


def _make_room(entries: dict[K, V], limit: int) -> None:
    if len(entries) >= limit:
        for old in list(entries)[: limit // 2]:
            del entries[old]
