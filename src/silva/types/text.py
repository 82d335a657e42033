"""Text and values from anywhere, made fit for files in UTF-8 and for error messages."""

from __future__ import annotations

import json
import re

MAX_SHOWN = 60
SURROGATE = re.compile("[\ud800-\udfff]")


def safe_text(text: str) -> str:
    """`text` with lone surrogates, which no UTF-8 file can hold, written as `\\udXXX`."""
    return text if text.isascii() else SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def shown(value: object) -> str:
    """The start of a JSON value for an error message: printable ASCII, short whatever the value's size is."""
    if isinstance(value, str):
        return ascii(value[:MAX_SHOWN]) + ("..." if len(value) > MAX_SHOWN else "")
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = json.dumps(value, default=str)
    except RecursionError:
        text = "a deeply nested value"
    return text[:MAX_SHOWN] + ("..." if len(text) > MAX_SHOWN else "")


def shown_field(value: object) -> str:
    """The same for the value of a field, where null is as good as none."""
    return "missing or null" if value is None else shown(value)
