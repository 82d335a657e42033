"""Which texts of options are addresses of servers."""

from __future__ import annotations

from urllib.parse import urlsplit


def is_address(text: str) -> bool:
    """Whether it is meant as the address of a server rather than as a folder."""
    return "://" in text


def is_base_url(text: str) -> bool:
    """Whether it is a plain address of a server: no query, fragment, user name or password."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    bare = not (parts.query or parts.fragment or parts.username or parts.password) and text.isascii()
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and bare and " " not in text
