"""Addresses of servers among the options."""

from __future__ import annotations

from urllib.parse import urlsplit


def is_address(text: str) -> bool:
    """It is meant as the address of a server, not as a folder."""
    return "://" in text


def is_base_url(text: str) -> bool:
    """It is the plain address of a server: no path parameters, no name or password."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    bare = not (parts.query or parts.fragment or parts.username or parts.password) and text.isascii()
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and bare and " " not in text
