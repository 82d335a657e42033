"""When so many sessions fail that the run is to stop."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from silva.judge import SlotFailure
from silva.types import RunStopped


class FailureBudget:
    """Stops the run after too many failed sessions in a row; the error carries the first failure of that row, and how
    many of that row had which reason. The error names `run_dir` as the place to look.
    """

    def __init__(self, limit: int, run_dir: Path | None = None):
        self._limit = limit
        self._run_dir = run_dir
        self._in_row = 0
        self._first: SlotFailure | None = None
        self._reasons: Counter[str] = Counter()

    def success(self) -> None:
        self._in_row = 0
        self._first = None
        self._reasons.clear()

    def failure(self, failure: SlotFailure) -> None:
        """Count one. Raises RunStopped at the limit."""
        self._first = self._first or failure
        self._in_row += 1
        self._reasons[failure.reason] += 1
        if self._in_row >= self._limit:
            raise self.stopped(f"{self._in_row} sessions failed in a row (--agent-max-failures {self._limit})")

    def stopped(self, why: str) -> RunStopped:
        """The error for a run that cannot go on, with the first failure's text and where to look."""
        first, lines = self._first, [why]
        if first is not None:
            reasons = ", ".join(f"{reason} {number}" for reason, number in self._reasons.most_common())
            lines += [
                f"Failed sessions since the last good one, by reason: {reasons}",
                f"The first: session {first.session_id}, {first.reason}: {first.message.rstrip()}",
            ]
        if self._run_dir is not None:
            lines.append(f"Look closer with: silva show {self._run_dir}" + (f" {first.session_id}" if first else ""))
        return RunStopped("\n".join(lines))
