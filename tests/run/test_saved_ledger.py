"""A checkpoint is never newer than the ledger that a resumed run compares it with."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from contexts import context

from silva.data.prompts import Prompt
from silva.judge.group_end import GroupResult
from silva.rollout.group_tally import StepGroups
from silva.run.run_loop import RunLoop, RunLoopSettings
from silva.store.files import DB_NAME
from silva.store.ledger import RunLedger
from silva.store.metrics import MetricsWriter
from silva.train.step_result import StepResult
from silva.types.rollout import SessionInput, TrainingSample


class OneStep:
    """One group, once."""

    def __init__(self) -> None:
        self.samples = (context("s", None, [(2, 3)], reward=1.0),)

    async def collect(self, rollout_id: int) -> StepGroups:
        if rollout_id:
            return StepGroups(groups=[])
        prompt = Prompt(
            prompt_id="train:0:0", dataset="train", epoch=0, row=0, position=0, input=SessionInput(messages=[])
        )
        return StepGroups(groups=[GroupResult(prompt=prompt, group_id="g", samples=self.samples, failures=())])


class LooksAtTheDisk:
    """A train backend that notes, when it saves, which prompts the file says are trained."""

    version = 0

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self.trained: list[list[str]] = []

    def leave_out_too_long(self, samples: list[TrainingSample]) -> tuple[list[TrainingSample], int]:
        return list(samples), 0

    async def train_rollout(self, samples: object, *, rollout_step: int, num_steps: int = 1) -> list[StepResult]:
        self.version += 1
        return []

    async def save(self, folder: Path, *, step: int, extra: dict[str, object]) -> None:
        with sqlite3.connect(f"file:{self._run_dir / DB_NAME}?mode=ro", uri=True) as conn:
            rows = conn.execute("SELECT prompt_id FROM prompts WHERE state = 'trained'").fetchall()
        self.trained.append([prompt_id for (prompt_id,) in rows])


async def test_what_a_checkpoint_trained_is_in_the_ledger_before_it_is_written(tmp_path: Path) -> None:
    backend, metrics = LooksAtTheDisk(tmp_path), MetricsWriter(tmp_path)
    with RunLedger(tmp_path) as ledger:
        ledger.issue_prompt("train:0:0", dataset="train", epoch=0, row=0, position=0)
        loop = RunLoop(
            backend=backend,  # pyright: ignore[reportArgumentType]
            engine=None,
            source=OneStep(),
            evaluator=None,
            ledger=ledger,
            metrics=metrics,
            report=None,
            settings=RunLoopSettings(
                run_dir=tmp_path,
                first_rollout=0,
                num_rollout=1,
                global_batch_size=None,
                eval_interval=None,
                save_interval=1,
                save_hf=None,
                custom_credit=True,
            ),
            say=lambda text: None,
        )
        await loop.run()
    assert backend.trained == [["train:0:0"]]
    assert backend.version == 1 and metrics.latest["staleness/max"] == 0, "seen from the weights that the step trained"
