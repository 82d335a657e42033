"""RUN_DIR/metrics.jsonl: one line of numbers a step."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger("silva.metrics")

METRICS_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends one JSON object a step:

    `step` and numbers by name. A number that is not finite is left out and reported.
    """

    def __init__(self, run_dir: Path, *, keep_before_step: int | None = None):
        self._path = run_dir / METRICS_NAME
        self.latest: dict[str, float] = {}
        """The newest value of each metric written here."""
        if keep_before_step is not None:
            self._drop_from(keep_before_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a line and hand it to the operating system at once."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for name in metrics.keys() - finite.keys():
            log.warning("metric %s of step %d is %s and was left out", name, step, metrics[name])
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **finite}) + "\n")
        self.latest |= finite

    def _drop_from(self, step: int) -> None:
        """Leave out the lines of steps that a resumed run takes again."""
        if not self._path.exists():
            return
        kept = [line for line in self._path.read_text(encoding="utf-8").splitlines() if _step_of(line) < step]
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        temporary.replace(self._path)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # a line cut by a kill
