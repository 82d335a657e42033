"""Corrections for stale and foreign tokens through the trainer and the learner, on a real model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from near_samples import make_trainer, samples_near, with_credit
from recorded_dump import write_dump
from train_tiny import random_samples, write_least_model

from silva.credit.assign import assign_group_credit
from silva.judge.group_end import GroupSettings
from silva.rollout.recorded_groups import RecordedGroups
from silva.train.custom_tis import CustomTis, read_weights
from silva.train.learner import Learner, TorchThread
from silva.train.objective import ObjectiveConfig
from silva.train.options import StepOptions, TisOptions
from silva.train.step_result import StepResult
from silva.types.errors import RunStopped, SilvaError
from silva.types.generation import VersionSpan
from silva.types.rollout import TrainingSample

Weigh = Callable[[list[float], list[float]], object]


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_least_model(tmp_path_factory.mktemp("model"))


def test_fractions_count_trainable_tokens(hf_dir: Path) -> None:
    trainer = make_trainer(hf_dir, ObjectiveConfig(tis=TisOptions(tis_mode="mask"), opsm_delta=0.1), lr=0.0)
    samples = samples_near(trainer, [0.0, math.log(3), -0.5, -0.5])
    metrics = trainer.train_step(with_credit(samples, 1.0, 1.0, 1.0, -1.0)).metrics
    assert metrics["train/tis"] == pytest.approx((1 + 3 + 2 * math.exp(-0.5)) / 4, rel=1e-5)
    assert metrics["train/tis_clipfrac"] == 0.25  # the second alone
    assert metrics["train/opsm_clipfrac"] == 0.25  # the fourth alone: the third is as far, but went well


def test_corrections_do_not_depend_on_packing_or_order(hf_dir: Path) -> None:
    samples = [
        replace(
            one,
            token_ids=[i % 32 for i in one.token_ids],
            logprobs=[(lp - 2) * bit for lp, bit in zip(one.logprobs, one.loss_mask, strict=True)],
        )
        for one in random_samples(7, 5)
    ]
    packings = ((1, {}), (-1, {"micro_batch_size": 3}), (-1, {"max_tokens_per_gpu": 40}))
    trainers = [(order, make_trainer(hf_dir, ObjectiveConfig(), lr=0.0, **packing)) for order, packing in packings]
    for level in ("token", "sequence", "geometric"):
        objective = ObjectiveConfig(tis=TisOptions(tis_level=level, tis_mode="mask", tis_clip_low=0.2), opsm_delta=0.5)
        found: list[dict[str, float]] = []
        for order, trainer in trainers:
            trainer.config = replace(trainer.config, objective=objective)
            found.append(trainer.train_step(samples[::order]).metrics)
        assert 0 < found[0]["train/tis_clipfrac"] < 1 and 0 < found[0]["train/opsm_clipfrac"] < 1
        assert found[1] == pytest.approx(found[0], rel=1e-5, abs=1e-6)
        assert found[2] == pytest.approx(found[0], rel=1e-5, abs=1e-6)


def learn(learner_of: Callable[[TorchThread], Learner], samples: Sequence[TrainingSample], **how: Any):
    """One rollout step of a learner."""

    async def run() -> list[StepResult]:
        with closing(TorchThread()) as thread:
            return await learner_of(thread).train_rollout(samples, **{"rollout_step": 0, **how})

    return asyncio.run(run())


def custom(weigh: Weigh) -> CustomTis:
    async def function(args: object, old: list[float], recorded: list[float]) -> object:
        assert args == "options"
        return weigh(old, recorded)

    return CustomTis(function, options="options", failed=SilvaError, path="mine.weigh")


def test_weights_of_a_function_are_those_of_tis_where_they_are_equal(hf_dir: Path) -> None:
    def weigh(old: list[float], recorded: list[float]) -> object:
        assert len(old) == 3
        return [min(2.0, math.exp(a - b)) for a, b in zip(old, recorded, strict=True)]

    built_in = make_trainer(hf_dir, ObjectiveConfig(tis=TisOptions()))
    samples = samples_near(built_in, [0.0, 1.5, -1.0])
    (expected,) = learn(lambda thread: Learner(built_in, thread), samples)
    mine = make_trainer(hf_dir, ObjectiveConfig())
    (result,) = learn(lambda thread: Learner(mine, thread, weigh_tokens=custom(weigh)), samples)
    for name in ("loss", "grad_norm"):
        assert result.metrics[f"train/{name}"] == pytest.approx(expected.metrics[f"train/{name}"], rel=1e-5)
    assert result.metrics["train/tis"] == pytest.approx((1 + 2 + math.exp(-1)) / 3, rel=1e-5)
    assert (result.metrics["train/tis_clipfrac"], result.metrics["train/custom_tis_failed"]) == (0.0, 0.0)
    # several steps share one asking
    results = learn(lambda thread: Learner(mine, thread, weigh_tokens=custom(weigh)), samples, num_steps=3)
    assert [one.num_sessions for one in results] == [1, 1, 1]


def test_a_sequence_without_weights_is_left_out_named_and_counted(
    hf_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def weigh(old: list[float], recorded: list[float]) -> object:
        if recorded[0] < old[0] - 1:
            raise SilvaError("mine.weigh raised KeyError: 'x'")
        return [1.0] * (len(old) - (recorded[0] > old[0] + 1))

    trainer = make_trainer(hf_dir, ObjectiveConfig(), lr=0.0)
    samples = samples_near(trainer, [0.0, 2.0, -2.0])
    (result,) = learn(lambda thread: Learner(trainer, thread, weigh_tokens=custom(weigh)), samples)
    assert result.metrics["train/custom_tis_failed"] == 2 and not result.skipped
    assert result.metrics["train/tis_clipfrac"] == pytest.approx(2 / 3)
    assert "session s1: its policy loss is left out, since it has no weights: mine.weigh raised KeyError" in caplog.text
    assert "session s2" in caplog.text and "returned 2 weights for a sequence of 3 trainable tokens" in caplog.text
    with pytest.raises(RunStopped, match=r"any of the 2 sequences of this step; the first: mine\.weigh raised"):
        learn(lambda thread: Learner(trainer, thread, weigh_tokens=custom(weigh)), samples[1:])


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (None, "returned None; it must be a list of 2 numbers"),
        ("12", "returned '12'"),
        ({"0": 1.0, "1": 1.0}, "it must be a list"),
        ([1.0], "returned 1 weights"),
        ([1.0, math.nan], "nan for token 1"),
        ([math.inf, 1.0], "inf for token 0"),
        ([1.0, -0.5], "-0.5 for token 1"),
        ([1.0, True], "True for token 1"),
        ([1.0, 10**400], "for token 1"),
        ([1.0, "1"], "'1' for token 1"),
        ([[1.0], 1.0], r"\[1.0\] for token 0"),
    ],
)
def test_what_is_no_weight_is_said(value: object, part: str) -> None:
    with pytest.raises(SilvaError, match=part):
        read_weights(value, 2)


def test_whole_numbers_are_weights() -> None:
    assert read_weights([0, 2], 2).tolist() == [0.0, 2.0]


def spanned(sample: TrainingSample, *versions: int) -> TrainingSample:
    """The sample with these weight versions behind its sampled tokens, in order."""
    left = iter(versions)
    spans = [
        VersionSpan(start=at, length=1, version=next(left) if bit else -1) for at, bit in enumerate(sample.loss_mask)
    ]
    return replace(sample, version_spans=tuple(spans))


def test_stale_tokens_leave_the_denominators_and_their_session_stays_in_the_baseline(
    hf_dir: Path, tmp_path: Path
) -> None:
    base = [replace(one, credit=None) for one in samples_near(make_trainer(hf_dir, ObjectiveConfig()), [0.0] * 3)]
    recorded = [
        spanned(replace(base[0], reward=1.0), 3, 2, 1),
        spanned(replace(base[1], reward=0.0), 0, 1, 1),
        spanned(replace(base[2], reward=0.0), 3, 3, 3),
    ]
    write_dump(tmp_path / "3.jsonl", [recorded])
    rule = GroupSettings(mode="train", num_samples=3, min_size=2, num_retries=0)
    step = asyncio.run(RecordedGroups(f"{tmp_path}/{{rollout_id}}.jsonl", num_rollout=4, settings=rule).collect(3))
    samples, stats = assign_group_credit([one for group in step.groups for one in group.samples])
    assert stats.num_sessions == 3
    # the mean over all three rewards, though one session has nothing to train
    assert [one.credit for one in samples] == pytest.approx([2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5], abs=1e-5)

    def trained(limit: int | None, chosen: Sequence[TrainingSample] = samples) -> StepResult:
        trainer = make_trainer(hf_dir, ObjectiveConfig(), lr=0.0)
        settings = StepOptions(max_token_staleness=limit)
        return learn(lambda thread: Learner(trainer, thread, options=settings, version=3), chosen)[0]

    result = trained(1)
    assert (result.num_trainable, result.num_samples, result.num_sessions) == (5, 2, 3)
    assert (result.metrics["train/stale_tokens"], result.metrics["train/empty_sessions"]) == (4, 1)
    # the mean of the two tokens that are left of s0 and the three of s2, over three sessions: the ratio is 1
    expected = -(2 / 3**0.5 + 0 - 1 / 3**0.5) / 3
    assert result.metrics["train/loss"] == pytest.approx(expected, abs=1e-5)
    alike = [replace(samples[0], loss_mask=[0, 1, 1, 0, 0]), samples[2]]
    assert result.metrics["train/grad_norm"] == pytest.approx(
        trained(None, alike).metrics["train/grad_norm"] * 2 / 3, rel=1e-5
    )
    assert [trained(limit).metrics["train/stale_tokens"] for limit in (0, 2, 3)] == [5, 1, 0]
    assert "train/stale_tokens" not in trained(None).metrics
    gone = trained(0, samples[1:2])
    assert (gone.reason, gone.metrics["train/stale_tokens"]) == ("no_trainable_tokens", 3)


def test_a_function_of_the_user_sees_fresh_tokens_alone(hf_dir: Path) -> None:
    asked: list[int] = []

    def weigh(old: list[float], recorded: list[float]) -> object:
        asked.append(len(old))
        assert old == pytest.approx(recorded, abs=1e-5)
        return [0.5] * len(old)

    trainer = make_trainer(hf_dir, ObjectiveConfig(), lr=0.0)
    base = samples_near(trainer, [0.0, 0.0])
    samples = [spanned(base[0], 4, 0, 4), spanned(base[1], 0, 0, 0)]
    (result,) = learn(
        lambda thread: Learner(
            trainer, thread, options=StepOptions(max_token_staleness=2), weigh_tokens=custom(weigh), version=4
        ),
        samples,
    )
    assert asked == [2] and result.num_trainable == 2
    assert (result.metrics["train/tis"], result.metrics["train/loss"]) == pytest.approx((0.5, -0.25))


def test_recorded_logprobs_as_those_of_the_old_policy(hf_dir: Path) -> None:
    trainer = make_trainer(hf_dir, ObjectiveConfig(rollout_as_old=True), lr=0.0)
    samples = with_credit(samples_near(trainer, [0.0, 0.1, 2.0]), 1.0, 1.0, 1.0)
    results = learn(lambda thread: Learner(trainer, thread), samples, num_steps=3)
    # the ratio is against what was recorded: 1, e^0.1, and 1.2 where it is clipped
    assert [one.metrics["train/loss"] for one in results] == pytest.approx([-1, -math.exp(0.1), -1.2], rel=1e-5)
    assert [one.metrics["train/pg_clipfrac"] for one in results] == [0, 0, 1]
    assert results[2].metrics["train/ppo_kl"] == pytest.approx(-2.0, rel=1e-5)
    assert results[2].metrics["train/rollout_logprob_abs_diff"] == pytest.approx(2.0, rel=1e-5)
