"""The loop that joins rollout and training: collect, update, publish, record, save."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from silva.credit import GroupStats
from silva.inference import Engine
from silva.judge import GroupResult
from silva.rollout import StepGroups, tally
from silva.run.evaluator import Evaluator
from silva.run.metrics import rollout_metrics, staleness_metrics
from silva.run.report import StepReport
from silva.store import MetricsWriter, RunLedger
from silva.train import StepResult, TrainBackend, checkpoint_dir, prune_checkpoints
from silva.types import TrainingSample

log = logging.getLogger("silva.train")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLoopSettings:
    """How long a run goes on, and what it does beside its steps. Intervals count rollout steps; None is never."""

    run_dir: Path
    """Folder of the run; checkpoints go beneath it."""
    first_rollout: int
    """The step to begin with: 0, or where a resumed run goes on."""
    num_rollout: int | None
    """Steps of the whole run; None to go on until the prompts are over."""
    global_batch_size: int | None
    """Sessions of one optimizer step; None takes all of a rollout step into one."""
    eval_interval: int | None
    """Steps from one evaluation to the next."""
    save_interval: int | None
    """Steps from one checkpoint to the next."""
    save_hf: Path | None
    """Where the last weights go in Hugging Face form; None for nowhere."""
    passrate: bool = False
    """Whether pass@k is among the metrics."""
    num_steps: int | None = None
    """Optimizer steps per rollout step; None derives them from `global_batch_size`."""
    custom_credit: bool = False
    """Whether a function of the user gives credit. Else rewards do, and groups without spread are counted."""
    keep_checkpoints: int = 2
    """So many of the newest checkpoints stay on the disk."""

    def steps_of(self, num_slots: int, num_sessions: int) -> int:
        """Optimizer steps on a rollout whose prompts had so many slots, of which so many sessions are trained.

        Failed sessions make the steps smaller; fewer only where there would be less than a session for each.
        """
        steps = self.num_steps
        if steps is None:
            steps = 1 if self.global_batch_size is None else round(num_slots / self.global_batch_size)
        return max(1, min(steps, num_sessions))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Update:
    """The optimizer steps of a rollout step; none where nothing is trained."""

    trained: list[TrainingSample]
    num_too_long: int = 0
    results: list[StepResult] = field(default_factory=list[StepResult])

    def metrics(self) -> dict[str, float]:
        if not self.results:
            return {}
        return {**mean_metrics(self.results), "train/too_long_samples": float(self.num_too_long)}


class GroupSource(Protocol):
    """Where the groups of a rollout step come from: agents that run now, or a record of some that ran."""

    async def collect(self, rollout_id: int) -> StepGroups:
        """The groups of one step; none that counts when there is nothing left."""
        ...


@dataclass(kw_only=True, eq=False)
class RunLoop:
    """One rollout step after the other, each with its update: staleness is 0.

    Consumes groups of its source; produces weight versions (one per update), ledger ends
    `trained`, metrics and checkpoints. The ledger is on the disk before a checkpoint that depends on it is written,
    so that a resumed run trains no prompt twice.

    Without `backend` nothing is trained: the groups get their credit and end as `delivered`. Without `engine` the new
    weights go nowhere, and without `ledger` and `report` nothing but metrics and checkpoints is written: such is a run
    over recorded groups.
    """

    backend: TrainBackend | None
    """What trains; None: nothing does."""
    engine: Engine | None
    """Receives the new weights; None: they go nowhere."""
    source: GroupSource
    """Where the groups of a step come from."""
    evaluator: Evaluator | None
    """None: no eval."""
    ledger: RunLedger | None
    """None for a run on recorded groups."""
    metrics: MetricsWriter
    """Where the numbers of each step go."""
    report: StepReport | None
    """Closes the accounts of each step; None for a run on recorded groups."""
    settings: RunLoopSettings
    """Lengths and intervals."""
    say: Callable[[str], None]
    """Receives one line per step and eval."""

    def __post_init__(self) -> None:
        self.saved_rollout = self.settings.first_rollout
        """Rollout steps that the last checkpoint contains; 0 without one."""

    async def run(self) -> int:
        """Train until --num-rollout steps are done or the prompts are over; returns how many are done in all."""
        settings = self.settings
        rollout_id = settings.first_rollout
        evaluated = saved = -1
        if settings.num_rollout is not None and 0 < settings.num_rollout <= rollout_id:
            self.say(f"nothing left to do: {rollout_id} of {settings.num_rollout} rollout steps are done")
            return rollout_id
        while settings.num_rollout is None or rollout_id < settings.num_rollout:
            if settings.eval_interval and rollout_id % settings.eval_interval == 0:
                await self._evaluate(rollout_id)
                evaluated = rollout_id
            if not await self._step(rollout_id):
                break
            rollout_id += 1
            if settings.save_interval and rollout_id % settings.save_interval == 0:
                await self._save(rollout_id)
                saved = rollout_id
        if settings.eval_interval and evaluated != rollout_id:
            await self._evaluate(rollout_id, last=True)
        if settings.save_interval and saved != rollout_id and rollout_id > settings.first_rollout:
            await self._save(rollout_id)
        if settings.save_hf is not None:
            assert self.backend is not None
            await self.backend.save_hf(settings.save_hf)
            self.say(f"weights in Hugging Face form: {settings.save_hf}")
        return rollout_id

    async def _step(self, rollout_id: int) -> bool:
        """One rollout step and its update. False when there was no prompt left."""
        started_s = time.monotonic()
        step = await self.source.collect(rollout_id)
        groups = step.groups
        if not groups:
            return False
        collected_s = time.monotonic()
        samples = [sample for group in groups for sample in group.samples]
        version = self._version()  # of the weights that this step trains, not of those that it makes
        update = await self._update(rollout_id, groups, samples)
        trained_s = time.monotonic()
        self._write_ledger(rollout_id, groups, samples)
        values = {
            **rollout_metrics(step, passrate=self.settings.passrate),
            **({} if self.settings.custom_credit else GroupStats.of(samples).metrics()),
            **staleness_metrics(samples, version=version),
            **update.metrics(),
            "perf/step_s": trained_s - started_s,
            "perf/rollout_s": collected_s - started_s,
            "perf/train_s": trained_s - collected_s,
            "perf/tokens_per_s": sum(len(sample.token_ids) for sample in update.trained) / (trained_s - started_s),
        }
        if self.report is not None:
            values |= await self.report.finish(rollout_id)
        self.metrics.write(rollout_id, values)
        self.say(_step_line(rollout_id, values, update.results))
        return True

    async def _update(self, rollout_id: int, groups: list[GroupResult], samples: list[TrainingSample]) -> _Update:
        """The optimizer steps of one rollout, and the new weights to the engine."""
        backend = self.backend
        if backend is None:
            return _Update(trained=samples)
        trained, num_too_long = backend.leave_out_too_long(samples)
        num_slots = sum(group.num_sessions + group.num_failed for group in map(tally, groups))
        num_steps = self.settings.steps_of(num_slots, len({sample.session_id for sample in trained}))
        results = await backend.train_rollout(trained, rollout_step=rollout_id, num_steps=num_steps)
        if self.engine is not None:
            await self.engine.load_weights(await backend.publish())
        return _Update(trained=trained, num_too_long=num_too_long, results=results)

    def _version(self) -> int:
        """The weight version in training; where nothing is trained, that of the engine."""
        if self.backend is not None:
            return self.backend.version
        return 0 if self.engine is None else self.engine.version

    def _write_ledger(self, rollout_id: int, groups: list[GroupResult], samples: list[TrainingSample]) -> None:
        if self.ledger is None:
            return
        self.ledger.set_credits(samples)
        state = "delivered" if self.backend is None else "trained"
        self.ledger.end_prompts([group.prompt.prompt_id for group in groups], state, train_step=rollout_id)

    async def _evaluate(self, rollout_id: int, *, last: bool = False) -> None:
        if self.evaluator is None:
            return
        when = "at the end" if last else f"before step {rollout_id}"
        for result in await self.evaluator.run(rollout_id):
            self.metrics.write(rollout_id, result.metrics())
            reward = "none" if result.mean_reward is None else f"{result.mean_reward:.3f}"
            self.say(
                f"eval {result.name} {when}: reward {reward} over {result.num_sessions} sessions, "
                f"{result.num_failed} failed"
            )

    async def _save(self, next_rollout: int) -> None:
        """A checkpoint after `next_rollout` steps; the ledger it depends on is on the disk first."""
        assert self.backend is not None
        if self.ledger is not None:
            await asyncio.wrap_future(self.ledger.flush_future())
        root = self.settings.run_dir / "checkpoints"
        folder = checkpoint_dir(root, next_rollout)
        await self.backend.save(folder, step=next_rollout - 1, extra={"next_rollout": next_rollout})
        await asyncio.to_thread(prune_checkpoints, root, self.settings.keep_checkpoints)
        self.saved_rollout = next_rollout
        log.info("checkpoint %s", folder)


def mean_metrics(results: list[StepResult]) -> dict[str, float]:
    """Metrics of a rollout's optimizer steps, averaged over the steps that have them; skipped steps are counted."""
    names = {name for result in results for name in result.metrics}
    means: dict[str, float] = {}
    for name in sorted(names):
        values = [result.metrics[name] for result in results if name in result.metrics]
        means[name] = sum(values) / (1 if "skipped_" in name else len(values))
    means["train/num_skipped_steps"] = float(sum(result.skipped for result in results))
    return means


_STEP_LINE = {
    "train/loss": "loss",
    "train/value_loss": "value loss",
    "train/grad_norm": "grad norm",
    "train/kl_loss": "kl loss",
    "train/kl_reward": "kl reward",
    "train/opd_kl": "teacher kl",
    "train/tis": "tis",
}
"""What the line of a step shows of the metrics of training, where the step has them, and how it is called there."""


def _step_line(rollout_id: int, values: dict[str, float], results: list[StepResult]) -> str:
    skipped = [result.reason for result in results if result.reason is not None]
    note = f"  skipped: {', '.join(skipped)}" if skipped else ""
    learned = "".join(f"  {label} {values[name]:.4f}" for name, label in _STEP_LINE.items() if name in values)
    train = f"  train {values['perf/train_s']:.1f} s" if results else ""
    reward = f"{values['rollout/raw_reward']:.3f}" if "rollout/raw_reward" in values else "none"
    return (
        f"step {rollout_id}: reward {reward}{learned}  "
        f"sessions {values['rollout/num_sessions']:.0f}  rollout {values['perf/rollout_s']:.1f} s{train}{note}"
    )
