"""What functions of the user see: an exported context, a group, and the options of the run; read-only and picklable.

Standard library only: the worker processes of user code load this.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleView:
    """One exported context."""

    prompt: str
    """The text before the first answer of the model, special tokens included."""
    response: str
    """All text after it: later turns and tool results too."""
    prompt_ids: list[int]
    """The tokens of `prompt`."""
    response_ids: list[int]
    """The tokens of `response`."""
    messages: list[dict[str, Any]]
    """The conversation in Chat form; the last message is the last answer."""
    label: Any
    """The row's value under --label-key, None where it has none."""
    row_metadata: dict[str, object]
    """The `metadata` of the dataset row; empty where it has none."""
    metadata: dict[str, Any]
    """What the agent wrote for this context."""
    input: dict[str, Any]
    """What the agent was given: `messages`, `metadata`."""
    reward: float | None
    """The agent's own reward, None where it gave none."""
    helpers: dict[str, float] = field(default_factory=dict[str, float])
    """The other numbers of the agent's reward object."""
    status: str
    """Either "completed", or "truncated" where the last answer was cut."""
    name: str | None
    """None for a context that the agent did not name."""
    session_id: str
    """The session that exported the context."""
    group_id: str
    """The group of that session."""
    slot: int
    """The session's place in its group, from 0."""
    failed_slots: dict[int, str] = field(default_factory=dict[int, str])
    """With --group-rm: the slots of the group that yielded no session, with the reason; else empty."""
    mode: str
    """Either "train" or "eval"."""
    num_turns: int
    """Answers of the model in this context."""
    truncated: bool
    """True where the last answer was cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupView:
    """The group behind a call of a custom advantage function. Its function's first argument has the contexts.

    Example: of four slots the second failed, so that entry 1 of `metadata_by_slot` belongs to slot 2:
    `slots=[0, 2, 3], failed_slots={1: "agent_timeout"}`.
    """

    group_id: str
    """The group, as the ledger and the dumps name it."""
    row_metadata: dict[str, object]
    """The `metadata` of the dataset row; empty where it has none."""
    label: Any
    """The row's value under --label-key, None where it has none."""
    slots: list[int]
    """The slot of each entry of `metadata_by_slot`, in its order."""
    failed_slots: dict[int, str]
    """The slots that yielded no session, with the ledger's reason."""


class OptionsView:
    """The options of the run as attributes, by the flags' names with underscores. Nothing can be set."""

    __slots__ = ("_values",)
    _values: Mapping[str, Any]

    def __init__(self, values: Mapping[str, Any]):
        object.__setattr__(self, "_values", dict(values))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # also asked by pickle, before there are values
        try:
            return self._values[name]
        except KeyError:
            close = difflib.get_close_matches(name, list(self._values), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise AttributeError(f"there is no option {name}{hint}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"options cannot be set here ({name})")

    def __reduce__(self) -> tuple[type[OptionsView], tuple[dict[str, Any]]]:
        return OptionsView, (dict(self._values),)

    def __dir__(self) -> list[str]:
        return sorted(self._values)

    def __repr__(self) -> str:
        return f"OptionsView({dict(self._values)!r})"
