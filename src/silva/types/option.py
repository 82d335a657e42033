"""One option: what a field of the configuration says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionInfo:
    """How one field is read from the command line and checked."""

    group: str
    help: str
    kind: str
    choices: tuple[str, ...] = ()
    later_choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    metavar: str | None = None


def flag_of(name: str) -> str:
    """How an option of this name is written on the command line."""
    return "--" + name.replace("_", "-")


def opt(group: str, kind: str, default: Any, help: str, **more: Any) -> Any:
    """A dataclass field that carries its OptionInfo."""
    info = OptionInfo(group=group, help=help, kind=kind, **more)
    if type(default) in (list, dict):
        return field(default_factory=default.copy, metadata={"option": info})
    return field(default=default, metadata={"option": info})
