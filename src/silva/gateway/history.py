"""Digests of messages that a session has sent before, so that an unchanged history is not read again."""

from __future__ import annotations

import hashlib

import msgspec

from silva.types.messages import Conversation

MAX_PLAIN_BYTES = 96
MAX_ENTRIES = 1 << 15


class HistoryCache:
    """Raw JSON bytes of a message -> digest of its canonical form; one cache per session and protocol.

    Holds hashes only, never message text of any length. When full, the older half goes.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES):
        self._digests: dict[bytes, bytes] = {}
        self._max_entries = max_entries
        self._conversation: tuple[bytes, Conversation, tuple[str, ...]] | None = None

    @staticmethod
    def key(raw: msgspec.Raw) -> bytes:
        """A short name for raw bytes: the bytes themselves, or their hash where they are long."""
        data = memoryview(raw)
        if len(data) <= MAX_PLAIN_BYTES:
            return bytes(data)
        return b"#" + hashlib.blake2b(data, digest_size=16).digest()

    def get(self, key: bytes) -> bytes | None:
        return self._digests.get(key)

    def put(self, key: bytes, digest: bytes) -> None:
        if len(self._digests) >= self._max_entries:
            for old in list(self._digests)[: self._max_entries // 2]:
                del self._digests[old]
        self._digests[key] = digest

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

    def conversation(self, key: bytes) -> tuple[Conversation, tuple[str, ...]] | None:
        """The conversation (and the names of skipped tools) that the last request with the same raw tools had."""
        if self._conversation is None or self._conversation[0] != key:
            return None
        return self._conversation[1:]

    def keep_conversation(self, key: bytes, conversation: Conversation, skipped: tuple[str, ...]) -> None:
        self._conversation = (key, conversation, skipped)
