"""Opaque tokens that clients must carry back with reasoning: non-empty, signed by this process, ignored on input."""

from __future__ import annotations

import base64
import hashlib
import secrets

_KEY = secrets.token_bytes(32)


def sealed(text: str) -> str:
    """A short token for a piece of reasoning. It says nothing about the text; the same text gets the same token."""
    return base64.b64encode(
        hashlib.blake2b(text.encode("utf-8", "replace"), key=_KEY, digest_size=24).digest()
    ).decode()
