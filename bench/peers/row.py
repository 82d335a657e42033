"""What a row of bench/oracle.py is: a definition, and in a cell what a peer has in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from peers.cases import Case
from peers.ours import Arrays

Ours = Callable[[Case], Arrays]


@dataclass(frozen=True)
class Same:
    """The peer has the definition: all parts that both give must agree. `case`: another one than the row's."""

    job: str
    options: dict[str, Any] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    case: str | None = None


@dataclass(frozen=True)
class Other:
    """The peer has another definition. `reason` names why (see `reasons.WHY`), and `put_in` is Silva's with that reason
    put in, which must agree; None where the peer's result is no number."""

    job: str
    options: dict[str, Any]
    reason: str
    put_in: Ours | None
    parts: tuple[str, ...] = ()
    case: str | None = None


@dataclass(frozen=True)
class Refuses:
    """The peer raises ValueError."""

    job: str
    options: dict[str, Any]
    reason: str
    case: str | None = None


Cell = Same | Other | Refuses | str
"""A string: the peer has nothing of the kind."""

ABSENT = "-"


@dataclass(frozen=True)
class Row:
    algorithm: str
    what: str
    cases: tuple[str, ...]
    ours: Ours
    verl: Cell = ABSENT
    skyrl: Cell = ABSENT
    trl: Cell = ABSENT

    def cells(self) -> dict[str, Cell]:
        return {"verl": self.verl, "skyrl": self.skyrl, "trl": self.trl}
