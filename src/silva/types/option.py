"""One option: what a field of an options class says of itself.

An options class is a frozen dataclass in the room that uses it. Each field is one option: its name is the flag, its
annotation the type, its default the only place of that default.

    @dataclass(frozen=True, kw_only=True)
    class AgentOptions:
        agent_timeout: float = opt("agent", 1800.0, above=0)
        "Limit of a session's active time, in seconds."

is `--agent-timeout`, listed under "agent" in the help. The text below the field is its help: one sentence with the
unit.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
D = TypeVar("D", bound="DataclassInstance")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionInfo:
    """What the annotation of an option does not say."""

    group: str
    """Heading of the help page that lists the option."""
    choices: tuple[str, ...] = ()
    """The allowed values where the annotation is no `Literal` of them, else empty."""
    later_choices: tuple[str, ...] = ()
    """Values that are refused because what they name is not built yet."""
    low: float | None = None
    """The smallest number allowed; None for no bound."""
    above: float | None = None
    """The number that all allowed ones are above; None for no such bound."""
    high: float | None = None
    """The largest number allowed; None for no bound."""
    metavar: str | None = None
    """What the help shows for the value; None for a word that fits the type."""


def flag_of(name: str) -> str:
    """How an option of this name is written on the command line."""
    return "--" + name.replace("_", "-")


def opt(
    group: str,
    default: T,
    *,
    choices: tuple[str, ...] = (),
    later_choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    metavar: str | None = None,
) -> T:
    """A dataclass field that carries its OptionInfo."""
    info = OptionInfo(
        group=group, choices=choices, later_choices=later_choices, low=low, high=high, above=above, metavar=metavar
    )
    make = partial(copy, default)
    if isinstance(default, list | dict):
        return field(default_factory=make, metadata={"option": info})
    return field(default=default, metadata={"option": info})


def part_of(source: object, cls: type[D], **facts: Any) -> D:
    """A `cls` made of the fields that `source` has by the same names, and of `facts`, which win.

    Example: `part_of(config, ClipOptions)` has the three clip options of a RunConfig.
    """
    shared = {item.name: getattr(source, item.name) for item in fields(cls) if hasattr(source, item.name)}
    return cls(**{**shared, **facts})
