"""Field cases of batches whose size nobody knows before: rollout steps with many samples, one, and none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from contexts import context
from train_tiny import write_least_model

from silva.credit.assign import assign_group_credit
from silva.data.prompts import Prompt
from silva.judge.group_end import GroupResult, SlotFailure
from silva.rollout.group_tally import StepGroups
from silva.run.run_loop import RunLoop, RunLoopSettings
from silva.store.metrics import MetricsWriter
from silva.train.balance import plan
from silva.train.learner import Learner, TorchThread
from silva.train.options import Reduction
from silva.train.packing import pack_batch
from silva.train.policy import PolicyConfig, PolicyTrainer
from silva.types.rollout import SessionInput, TrainingSample

MAX_TOKENS = 12
CONTEXTS = (1, 1, 3, 2, 4)
"""Exported contexts of five sessions: 11 samples, which neither 4 ranks nor 2 optimizer steps divide."""


def exported(contexts: tuple[int, ...], size: int = 1) -> list[TrainingSample]:
    """Sessions of one group with so many contexts each, of 3 + size and more tokens."""
    return [
        context(f"g-{s}", f"c{c}" if num > 1 else None, [(2 + 2 * c, size + (s + c) % 3)], reward=float(s))
        for s, num in enumerate(contexts)
        for c in range(num)
    ]


@pytest.mark.parametrize("reduction", ["session_mean", "per_token", "seq_mean_token_sum_norm"])
@pytest.mark.parametrize("contexts", [CONTEXTS, (1,), ()])
def test_loss_10_four_ranks_share_any_number_of_samples_and_empty_rows_weigh_nothing(
    contexts: tuple[int, ...], reduction: Reduction
) -> None:
    samples, _ = assign_group_credit(exported(contexts))
    lengths = [len(sample.token_ids) for sample in samples]
    planned = plan(lengths, MAX_TOKENS, num_ranks=4)
    rows = [row for rank in planned.ranks for row in rank]
    assert sorted(i for row in rows for i in row) == list(range(sum(contexts))) and not planned.too_long
    assert [len(rank) for rank in planned.ranks] == [planned.num_rows] * 4
    assert planned.num_rows == {11: 2, 1: 1, 0: 0}[len(samples)]

    batch = pack_batch(samples, max_tokens=MAX_TOKENS, reduction=reduction, max_response_len=8)
    weight = [0.0] * len(samples)
    for row in batch.rows:
        for owner, share in zip(row.owners_N.tolist(), row.weights_N.tolist(), strict=True):
            weight[owner] += share
    of_ranks = [sum(weight[i] for row in rank for i in row) for rank in planned.ranks]
    num_tokens = sum(sample.num_trainable for sample in samples)
    expected = num_tokens / (8 * max(1, len(contexts))) if reduction == "seq_mean_token_sum_norm" else bool(contexts)
    assert sum(of_ranks) == pytest.approx(float(expected))
    if reduction == "session_mean":
        of_session = [
            sum(w for w, s in zip(weight, samples, strict=True) if s.session_id == f"g-{k}") for k in range(5)
        ]
        assert of_session[: len(contexts)] == pytest.approx([1 / max(1, len(contexts))] * len(contexts))


class Steps:
    """Groups of rollout steps as a run yields them, each with so many failed slots."""

    def __init__(self, steps: list[list[TrainingSample]], num_failed: int):
        self._steps, self._num_failed = steps, num_failed

    async def collect(self, rollout_id: int) -> StepGroups:
        if rollout_id == len(self._steps):
            return StepGroups(groups=[])
        prompt = Prompt(
            prompt_id=f"p{rollout_id}",
            dataset="train",
            epoch=0,
            row=rollout_id,
            position=rollout_id,
            input=SessionInput(messages=[]),
        )
        samples = tuple(assign_group_credit(self._steps[rollout_id])[0])
        failures = (SlotFailure(session_id="f", reason="r", message=""),) * self._num_failed
        return StepGroups(groups=[GroupResult(prompt=prompt, group_id="g", samples=samples, failures=failures)])


def run(
    tmp_path: Path,
    steps: list[list[TrainingSample]],
    say: Callable[[str], None],
    *,
    num_steps: int | None = 2,
    global_batch_size: int | None = None,
    num_failed: int = 0,
) -> tuple[Learner, list[dict]]:
    """A run over such steps, and its lines of metrics."""
    settings = RunLoopSettings(
        run_dir=tmp_path,
        first_rollout=0,
        num_rollout=None,
        global_batch_size=global_batch_size,
        num_steps=num_steps,
        eval_interval=None,
        save_interval=None,
        save_hf=None,
    )
    folder = write_least_model(tmp_path / "model")
    policy = PolicyTrainer(folder, PolicyConfig(lr=1e-3, device="cpu", max_tokens_per_gpu=MAX_TOKENS))
    with closing(TorchThread()) as thread:
        learner = Learner(policy, thread)
        trainer = RunLoop(
            backend=learner,
            engine=None,
            source=Steps(steps, num_failed),
            evaluator=None,
            ledger=None,
            metrics=MetricsWriter(tmp_path),
            report=None,
            settings=settings,
            say=say,
        )
        asyncio.run(trainer.run())
    return learner, [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_loss_10_optimizer_steps_follow_the_options_and_a_step_without_samples_is_skipped(tmp_path: Path) -> None:
    said: list[str] = []
    too_long = exported((1,), size=MAX_TOKENS)  # what is left out of training leaves none
    learner, lines = run(tmp_path, [exported(CONTEXTS), exported((1,)), too_long, exported((2, 1))], said.append)
    assert [line["rollout/num_contexts"] for line in lines] == [11, 1, 1, 3]
    # two optimizer steps where there are two sessions, however many samples these are
    assert learner.policy.num_updates == 2 + 1 + 0 + 2
    assert learner.policy.skipped_steps == {"no_trainable_tokens": 1}
    assert [line["train/num_skipped_steps"] for line in lines] == [0, 0, 1, 0]
    assert [line.get("train/skipped_no_trainable_tokens") for line in lines] == [None, None, 1, None]
    assert ["skipped: no_trainable_tokens" in line for line in said] == [False, False, True, False]
    assert lines[2]["train/too_long_samples"] == 1 and "train/loss" not in lines[2]


def test_loss_10_failed_sessions_do_not_change_how_many_optimizer_steps_a_prompt_has(tmp_path: Path) -> None:
    # a prompt of 8 slots and steps of 2 sessions: four steps, whether 8 or 5 sessions are left
    learner, (line,) = run(
        tmp_path, [exported(CONTEXTS)], lambda _: None, num_steps=None, global_batch_size=2, num_failed=3
    )
    assert learner.policy.num_updates == 4 and line["rollout/num_sessions"] == 5
