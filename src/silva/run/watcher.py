"""Whoever watches a run while it runs: a terminal, a notebook, a test."""

from __future__ import annotations

import logging
from typing import Protocol

from silva.types import Mode

log = logging.getLogger("silva.results")


class RunWatcher(Protocol):
    """Receives the results of a run and the progress of its steps. Must not block."""

    def say(self, text: str) -> None:
        """A result, one line."""
        ...

    def begin_step(self, title: str, num_sessions: int) -> None:
        """A rollout or eval step starts that wants so many sessions."""
        ...

    def scored(self, mode: Mode) -> None:
        """One more session of the step has its reward, or failed."""
        ...


class LogWatcher:
    """Logs results under the name `silva.results`, and ignores progress."""

    def say(self, text: str) -> None:
        log.info("%s", text)

    def begin_step(self, title: str, num_sessions: int) -> None:
        pass

    def scored(self, mode: Mode) -> None:
        pass
