"""The file of metrics over a resume."""

from __future__ import annotations

import json
from pathlib import Path

from silva.store.metrics import METRICS_NAME, MetricsWriter


def test_a_resumed_run_drops_the_lines_of_later_steps_and_one_cut_by_a_kill(tmp_path: Path) -> None:
    first = MetricsWriter(tmp_path)
    for step in range(3):
        first.write(step, {"loss": float(step)})
    file = tmp_path / METRICS_NAME
    file.write_text(file.read_text() + '{"step": 0, "lo')
    MetricsWriter(tmp_path, keep_before_step=2).write(2, {"loss": 7.0})
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == [{"step": 0, "loss": 0.0}, {"step": 1, "loss": 1.0}, {"step": 2, "loss": 7.0}]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_NAME]
