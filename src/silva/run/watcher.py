"""Who looks on while a run goes on: a terminal, a notebook, a test."""

from __future__ import annotations

from typing import Protocol

from silva.types.rollout import Mode


class RunWatcher(Protocol):
    """Is told the results of a run and how far its step is. Must not block."""

    def say(self, text: str) -> None:
        """A result, one line."""
        ...

    def begin_step(self, title: str, num_sessions: int) -> None:
        """A rollout or eval step wants so many sessions."""
        ...

    def scored(self, mode: Mode) -> None:
        """One more session of the step has its reward, or failed."""
        ...
