"""Text from anywhere, made fit for files in UTF-8."""

from __future__ import annotations

import re

SURROGATE = re.compile("[\ud800-\udfff]")


def safe_text(text: str) -> str:
    """`text` with lone surrogates, which no UTF-8 file can hold, written as `\\udXXX`."""
    return text if text.isascii() else SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
