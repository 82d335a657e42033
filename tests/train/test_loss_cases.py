"""Field cases of credit and loss, each through the code that a training step runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from spans import responses_of
from train_tiny import write_least_model

from silva.credit.assign import assign_group_credit
from silva.credit.grpo import standardised
from silva.credit.reward import MAX_ABS_REWARD, check_reward, read_reward
from silva.credit.spread import CreditFunction, has_no_spread
from silva.train.algorithms import ALGORITHMS
from silva.train.policy import PolicyConfig, PolicyTrainer
from silva.types.errors import SessionFailure
from silva.types.generation import VersionSpan
from silva.types.rollout import TrainingSample
from silva.wire.output_document import parse_output

COMPARING = list({row.credit.__name__: row.credit for row in ALGORITHMS.values() if row.compares}.values())


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_least_model(tmp_path_factory.mktemp("model"), initializer_range=0.02)


def make_sample(session: str, reward: float | None, credit: float | None = None) -> TrainingSample:
    spans = (VersionSpan(start=0, length=1, version=-1), VersionSpan(start=1, length=3, version=0))
    return TrainingSample(
        session_id=session,
        group_id="g",
        name=None,
        node_id=0,
        prompt_len=1,
        token_ids=[3, 4, 5, 6],
        loss_mask=[0, 1, 1, 1],
        logprobs=[0.0, -1.0, -1.0, -1.0],
        kept_mass=[1.0] * 4,
        version_spans=spans,
        responses=responses_of([0, 1, 1, 1]),
        reward=reward,
        credit=credit,
    )


def make_trainer(hf_dir: Path, **settings: Any) -> PolicyTrainer:
    return PolicyTrainer(hf_dir, PolicyConfig(**({"lr": 1e-2, "device": "cpu"} | settings)))


@pytest.mark.parametrize("reduction", ["session_mean", "per_token", "seq_mean_token_sum_norm"])
def test_loss_01_a_batch_without_a_trainable_token_is_a_skipped_counted_step(hf_dir: Path, reduction: str) -> None:
    trainer = make_trainer(hf_dir, loss_reduction=reduction, rollout_max_response_len=8)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    samples = [make_sample("s0", 1.0, 1.0), make_sample("s1", 0.0, -1.0)]
    for batch, masks in (([], None), (samples[:1], [[0] * 4]), (samples, [[0] * 4, [0] * 4])):
        result = trainer.train_step(batch, loss_masks=masks)
        assert result.skipped and result.reason == "no_trainable_tokens"
        assert result.metrics["train/skipped_no_trainable_tokens"] == 1
        assert all(math.isfinite(value) for value in result.metrics.values())
    assert trainer.skipped_steps == {"no_trainable_tokens": 3} and trainer.num_updates == 0
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_loss_01_a_masked_sample_beside_others_adds_nothing_but_stays_in_the_mean(hf_dir: Path) -> None:
    samples = [make_sample("s0", 1.0, 1.0), make_sample("s1", 0.0, -2.0)]
    masked = make_trainer(hf_dir).train_step(samples, loss_masks=[[0, 1, 1, 1], [0] * 4])
    alone = make_trainer(hf_dir).train_step(samples[:1])
    assert masked.metrics["train/empty_sessions"] == 1 and not masked.skipped
    for name in ("loss", "grad_norm"):
        assert masked.metrics[f"train/{name}"] == pytest.approx(alone.metrics[f"train/{name}"] / 2, rel=1e-5)
    # token means do not notice it
    for name in ("entropy", "rollout_logprob_abs_diff"):
        assert masked.metrics[f"train/{name}"] == pytest.approx(alone.metrics[f"train/{name}"], rel=1e-6)


@pytest.mark.parametrize("rewards", [[0.9] * 12, [0.3] * 6, [0.1 + 0.2, 0.3, 0.3]])
@pytest.mark.parametrize("credit_of", COMPARING)
def test_loss_03_equal_rewards_give_exactly_zero_and_are_counted(
    rewards: list[float], credit_of: CreditFunction
) -> None:
    samples = [make_sample(f"s{i}", reward) for i, reward in enumerate(rewards)]
    credited, stats = assign_group_credit(samples, credit_of=credit_of)
    assert [s.credit for s in credited] == [0.0] * len(rewards)
    assert stats.metrics() == {f"rollout/zero_std/count_{rewards[-1]:g}": 1.0}


def test_loss_03_rewards_that_went_through_float32_are_still_equal() -> None:
    samples = [make_sample(f"s{i}", check_reward(np.float32(0.9), f"s{i}")) for i in range(12)]
    assert {s.credit for s in assign_group_credit(samples)[0]} == {0.0}


def test_loss_03_a_real_spread_is_kept() -> None:
    assert not has_no_spread([0.5, 0.501])
    assert standardised([0.5, 0.501]) == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=2e-3)
    assert assign_group_credit([make_sample("a", 0.5), make_sample("b", 0.501)])[1].zero_std == {}


@pytest.mark.parametrize("credit_of", COMPARING)
@pytest.mark.parametrize("rewards", [[1.0], [1.0, None, None]])
def test_loss_04_one_valid_session_has_no_one_to_be_compared_with(
    rewards: list[float | None], credit_of: CreditFunction
) -> None:
    samples = [make_sample(f"s{i}", reward) for i, reward in enumerate(rewards)]
    credited, stats = assign_group_credit(samples, credit_of=credit_of)
    assert [(s.session_id, s.credit) for s in credited] == [("s0", 0.0)]
    assert stats.zero_std == {1.0: 1} and stats.num_sessions == 1
    assert set(stats.rejected) == {f"s{i}" for i in range(1, len(rewards))}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None, "1", {"score": 1}, np.float32("nan")])
def test_loss_05_a_bad_reward_is_stopped_at_the_border_with_its_session_named(bad: object) -> None:
    with pytest.raises(SessionFailure, match="session s1") as caught:
        check_reward(bad, "session s1")
    assert caught.value.reason == "reward_invalid"


def test_loss_05_the_other_sessions_of_the_group_are_compared_without_it() -> None:
    samples = [make_sample(f"s{i}", reward) for i, reward in enumerate([1.0, None, 0.0, 1.0])]
    credited, stats = assign_group_credit(samples)
    assert {s.session_id: s.credit for s in credited} == pytest.approx(
        dict(zip(["s0", "s2", "s3"], standardised([1.0, 0.0, 1.0]), strict=True))
    )
    assert "session s1" in str(stats.rejected["s1"]) and stats.rejected["s1"].reason == "reward_invalid"


@pytest.mark.parametrize("bad", ["NaN", "Infinity", "1e999", "1e300", '"1"', "true"])
def test_loss_05_what_an_agent_may_write_passes_every_later_border_or_none(bad: str) -> None:
    with pytest.raises(SessionFailure) as caught:
        read_reward(parse_output(f'{{"reward": {bad}}}'.encode()).reward, "session s1")
    assert caught.value.reason == "reward_invalid"
    for good in (MAX_ABS_REWARD, -MAX_ABS_REWARD, 5e-324, 0):
        assert check_reward(parse_output(f'{{"reward": {good}}}'.encode()).reward, "session s1") == good


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_loss_05_a_sample_cannot_even_hold_a_reward_or_credit_that_is_not_finite(bad: float) -> None:
    with pytest.raises(ValueError, match="s1"):
        make_sample("s1", bad)
    with pytest.raises(ValueError, match="s1"):
        replace(make_sample("s1", 1.0), credit=bad)


def test_loss_05_numpy_numbers_count_and_bools_only_from_reward_functions() -> None:
    assert check_reward(np.float32(0.5), "session s1") == 0.5
    assert check_reward(True, "session s1", allow_bool=True) == 1.0
    with pytest.raises(SessionFailure, match="bool"):
        check_reward(True, "session s1")
