"""The loop around the parts that need torch."""

from __future__ import annotations

import asyncio
from pathlib import Path

from silva.rollout.group_tally import StepGroups
from silva.run.run_loop import RunLoop, RunLoopSettings
from silva.store.metrics import METRICS_NAME, MetricsWriter


class Untouched:
    async def collect(self, rollout_id: int) -> StepGroups:
        raise AssertionError(f"step {rollout_id} was begun")


def test_a_run_that_is_done_does_nothing_more(tmp_path: Path) -> None:
    """Of a resumed run whose checkpoint holds all steps that are asked for, or more."""
    said: list[str] = []
    for first in (4, 5):
        settings = RunLoopSettings(
            run_dir=tmp_path,
            first_rollout=first,
            num_rollout=4,
            global_batch_size=None,
            eval_interval=1,
            save_interval=1,
            save_hf=tmp_path / "out",
        )
        loop = RunLoop(
            backend=None,
            engine=None,
            source=Untouched(),
            evaluator=None,
            ledger=None,
            metrics=MetricsWriter(tmp_path),
            report=None,
            settings=settings,
            say=said.append,
        )
        asyncio.run(loop.run())
    assert said == [f"nothing left to do: {first} of 4 rollout steps are done" for first in (4, 5)]
    assert not (tmp_path / "out").exists() and not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / METRICS_NAME).exists() or (tmp_path / METRICS_NAME).read_text() == ""
