"""Pictures for requests: bytes that begin as a PNG, and the forms in which the protocols carry them."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

Json = dict[str, Any]


def png(num_bytes: int = 64, mark: int = 0) -> bytes:
    """So many bytes with a PNG's signature; another `mark` gives other bytes."""
    return b"\x89PNG\r\n\x1a\n" + mark.to_bytes(4, "big") + bytes(num_bytes - 12)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def data_uri(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def chat_part(url: str) -> Json:
    return {"type": "image_url", "image_url": {"url": url}}


def messages_block(data: bytes, media_type: str = "image/png") -> Json:
    source = {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def text(words: str) -> Json:
    return {"type": "text", "text": words}
