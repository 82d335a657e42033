"""JSON as the standard has it: no NaN, no key twice."""

from __future__ import annotations

from typing import Any


def refuse_constant(text: str) -> Any:
    """For json.loads: NaN and the infinities are no JSON."""
    raise ValueError(f"{text} is no JSON value")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads: an object, ValueError where a key stands in it twice."""
    folded = dict(pairs)
    if len(folded) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return folded
