"""Server-sent events: one frame."""

from __future__ import annotations

import msgspec

from silva.types import JsonObject

DONE = b"data: [DONE]\n\n"
"""Ends a Chat stream."""


def data_frame(value: JsonObject, event: str | None = None) -> bytes:
    """One event with a JSON object as its data."""
    named = b"" if event is None else b"event: " + event.encode() + b"\n"
    return named + b"data: " + msgspec.json.encode(value) + b"\n\n"
