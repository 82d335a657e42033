"""What the writer and the reader of a recording share: model routes, and the request headers that are kept."""

from __future__ import annotations

from urllib.parse import urlsplit

MODEL_ROUTES = ("chat/completions", "responses", "messages")
"""The routes that ask for a model turn, without any prefix."""
RETRY_HEADERS = ("x-stainless-retry-count", "idempotency-key")
KEPT_HEADERS = ("user-agent", *RETRY_HEADERS)


def route_of(path: str) -> str | None:
    """The model route that a path or URL ends in, whatever comes before it; None where it ends in none."""
    plain = "/" + urlsplit(path).path.strip("/")
    return next((route for route in MODEL_ROUTES if plain.endswith("/" + route)), None)
