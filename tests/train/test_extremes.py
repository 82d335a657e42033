"""The largest and smallest numbers that may come in leave every number finite, with every algorithm."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train_tiny import make_sample, write_least_model

from silva.config.options import RunConfig
from silva.credit.assign import assign_group_credit
from silva.credit.reward import MAX_ABS_REWARD, check_reward
from silva.run.build_learner import critic_config, policy_config
from silva.run.run_loop import mean_metrics
from silva.train.algorithms import ALGORITHMS
from silva.train.critic import ValueTrainer
from silva.train.custom_tis import MAX_WEIGHT
from silva.train.learner import Learner, TorchThread
from silva.train.policy import PolicyTrainer
from silva.train.step_result import StepResult
from silva.types.generation import LOWEST_LOGPROB

EXTREMES = ([MAX_ABS_REWARD, -MAX_ABS_REWARD, 5e-324], [MAX_ABS_REWARD, MAX_ABS_REWARD * (1 - 1e-15)], [1e-310, 3e-310])
METRICS = ("loss", "pg_loss", "grad_norm", "ppo_kl", "entropy", "rollout_logprob_abs_diff", "pg_clipfrac")


@pytest.fixture(scope="module")
def thread() -> Iterator[TorchThread]:
    with closing(TorchThread()) as thread:
        yield thread


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_least_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_extreme_rewards_and_log_probs_make_a_step_of_finite_numbers(
    hf_dir: Path, thread: TorchThread, name: str
) -> None:
    config = RunConfig(hf_checkpoint=str(hf_dir), advantage_estimator=name, lr=1e-3, micro_batch_size=8)
    samples = [
        replace(
            make_sample(
                f"s{g}{i}", [3, 4, 5, 6 + i], [0, 1, 1, 1], credit=None, logprobs=[0.0, LOWEST_LOGPROB, -1.0, 0.0]
            ),
            group_id=f"g{g}",
            reward=check_reward(reward, "it"),
        )
        for g, rewards in enumerate(EXTREMES)
        for i, reward in enumerate(rewards)
    ]
    credited, _ = assign_group_credit(samples, credit_of=ALGORITHMS[name].credit)
    policy = policy_config(config)
    critic = ValueTrainer(hf_dir, critic_config(config, policy)) if ALGORITHMS[name].advantages == "gae" else None
    learner = Learner(PolicyTrainer(hf_dir, policy), thread, critic=critic)
    results = asyncio.run(learner.train_rollout(credited, rollout_step=0, num_steps=2))
    wanted = {
        f"train/{metric}" for metric in (*METRICS, *(() if critic is None else ("value_loss", "critic_grad_norm")))
    }
    for result in results:
        assert not result.skipped and not any("skipped" in metric for metric in result.metrics)
        assert wanted <= result.metrics.keys() and all(map(math.isfinite, result.metrics.values()))
    for model in (learner.policy.model, *(() if critic is None else (critic.model,))):
        assert all(bool(tensor.isfinite().all()) for tensor in model.parameters())


def test_the_largest_weights_and_rewards_fit_into_float32_together() -> None:
    # a policy loss is weight * ratio * credit, where no ratio is above exp(20)
    assert torch.tensor(MAX_WEIGHT) * torch.tensor(20.0).exp() * MAX_ABS_REWARD < torch.inf


def test_metrics_of_steps_are_means_and_skipped_steps_are_counted() -> None:
    shape = {"num_sessions": 1, "num_samples": 1, "num_tokens": 1, "num_trainable": 1}
    skipped = StepResult(metrics={"train/skipped_all_rejected": 1.0, "train/lr": 1.0}, reason="all_rejected", **shape)
    taken = StepResult(metrics={"train/loss": 3.0, "train/lr": 3.0}, reason=None, **shape)
    assert mean_metrics([skipped, taken, skipped]) == {
        "train/loss": 3.0,
        "train/lr": pytest.approx(5 / 3),
        "train/skipped_all_rejected": 2.0,
        "train/num_skipped_steps": 2.0,
    }
