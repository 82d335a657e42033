"""What functions of the user see: one exported context, and the options of the run. Both are read-only and picklable.

Standard library only: the worker processes of user code load this.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleView:
    """One exported context.

    `prompt` is the text before the first answer of the model and `response` all that follows, special tokens included;
    `prompt_ids` and `response_ids` are their tokens. `messages` holds the conversation in Chat form. `label` is the
    row's value under --label-key; `metadata` what the agent wrote for this context, `input` what it was given
    (`messages`, `metadata`). `reward` is the agent's own, None where it gave none, and `helpers` the other numbers of
    its reward object. `status` is "completed", or "truncated" where the last answer was cut (`truncated`). `name` is
    None for a context that the agent did not name.
    """

    prompt: str
    response: str
    prompt_ids: list[int]
    response_ids: list[int]
    messages: list[dict[str, Any]]
    label: Any
    metadata: dict[str, Any]
    input: dict[str, Any]
    reward: float | None
    helpers: dict[str, float] = field(default_factory=dict[str, float])
    status: str
    name: str | None
    session_id: str
    group_id: str
    mode: str
    num_turns: int
    truncated: bool


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
