from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_tiny import VOCAB, make_sample, random_samples, write_least_model, write_model
from transformers import AutoModelForCausalLM

from silva.train.advantages import AdvantageConfig
from silva.train.checkpoint import read_state
from silva.train.critic import CriticConfig, ValueTrainer
from silva.train.learner import Learner, TorchThread
from silva.train.options import StepOptions
from silva.train.policy import PolicyConfig, PolicyTrainer
from silva.train.schedule import Schedule
from silva.types.errors import ConfigError, SilvaError
from silva.types.generation import VersionSpan
from silva.types.rollout import TrainingSample

Arrays = list[np.ndarray]


@pytest.fixture(scope="session")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_least_model(tmp_path_factory.mktemp("critic"), vocab_size=VOCAB, tie_word_embeddings=True)


def make_critic(hf_dir: Path, *, head: bool = True, **settings: Any) -> ValueTrainer:
    """A critic, with weights in its head where it shall have an opinion."""
    critic = ValueTrainer(hf_dir, CriticConfig(**({"lr": 0.0, "clip_grad": 0.0, "device": "cpu"} | settings)))
    if head:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in critic.model.head.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.2)
    return critic


def targets(samples: Sequence[TrainingSample], critic: ValueTrainer) -> tuple[Arrays, Arrays]:
    """Old values near those of today, so that some are limited, and returns; NaN where nothing is trained."""
    rng = np.random.default_rng(3)
    old: Arrays = []
    returns: Arrays = []
    for sample, values_T in zip(samples, critic.compute_values(samples), strict=True):
        outside_T = np.where(np.asarray(sample.loss_mask) == 0, math.nan, 0.0)
        old.append(values_T + rng.normal(size=len(values_T)) * 0.4 + outside_T)
        returns.append(rng.normal(size=len(values_T)) + outside_T)
    return old, returns


def step(critic: ValueTrainer, samples: Sequence[TrainingSample], old: Arrays, returns: Arrays) -> dict[str, float]:
    return critic.train_step(samples, old_values=old, returns=returns, loss_masks=None, lr_scale=1.0)


def gradient_step(
    critic: ValueTrainer, samples: Sequence[TrainingSample], old: Arrays, returns: Arrays
) -> tuple[dict[str, float], list[torch.Tensor]]:
    """A step, and the gradient that reached the optimizer."""
    seen: list[torch.Tensor] = []

    def hook(*_: Any) -> None:
        seen.extend(p.grad.detach().clone() for p in critic.model.parameters() if p.grad is not None)

    handle = critic.optimizer.register_step_pre_hook(hook)
    metrics = step(critic, samples, old, returns)
    handle.remove()
    return metrics, seen


def weights_of(trainer: ValueTrainer | PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def by_definition(
    hf_dir: Path, critic: ValueTrainer, samples: Sequence[TrainingSample], old: Arrays, returns: Arrays
) -> tuple[Arrays, dict[str, float]]:
    """Values and metrics in float64 with transformers' own attention, one sample and token at a time."""
    model: Any = AutoModelForCausalLM.from_pretrained(hf_dir, attn_implementation="eager", dtype=torch.float64)
    weight_H = critic.model.head.weight.detach().double().numpy()[0]
    bias, config = float(critic.model.head.bias.detach()), critic.config
    clip = config.value_clip or math.inf
    values: Arrays = []
    losses: dict[str, list[float]] = {}
    limited: list[bool] = []
    pairs: list[tuple[float, float]] = []
    for sample, old_T, returns_T in zip(samples, old, returns, strict=True):
        with torch.no_grad():
            states_TH = model.model(input_ids=torch.tensor([sample.token_ids])).last_hidden_state[0].numpy()
        values_T = np.zeros(len(sample.token_ids))
        for t in np.flatnonzero(sample.loss_mask):
            v = values_T[t] = states_TH[t - 1] @ weight_H + bias
            near = min(max(v, old_T[t] - clip), old_T[t] + clip)
            plain, moved = (v - returns_T[t]) ** 2, (near - returns_T[t]) ** 2
            losses.setdefault(sample.session_id, []).append(max(plain, moved) / 2)
            limited.append(moved > plain)
            pairs.append((old_T[t], returns_T[t]))
        values.append(values_T)
    old_N, returns_N = np.array(pairs).T
    loss = {
        "session_mean": np.mean([np.mean(part) for part in losses.values()]),
        "per_token": np.mean([loss for part in losses.values() for loss in part]),
        "seq_mean_token_sum_norm": np.mean(
            [sum(part) / (config.rollout_max_response_len or 1) for part in losses.values()]
        ),
    }[config.reduction]
    return values, {
        "train/value_loss": float(loss),
        "train/value_clipfrac": float(np.mean(limited)),
        "train/value_mean": old_N.mean(),
        "train/return_mean": returns_N.mean(),
        "train/value_explained": 1 - np.var(returns_N - old_N) / np.var(returns_N),
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_reduction": "session_mean"},
        {"loss_reduction": "per_token", "value_clip": 0.0, "max_tokens_per_gpu": 24},
        {"loss_reduction": "seq_mean_token_sum_norm", "rollout_max_response_len": 9},
    ],
)
def test_a_step_equals_its_float64_definition(hf_dir: Path, settings: dict[str, Any]) -> None:
    samples = random_samples(1, 6)
    critic = make_critic(hf_dir, **({"micro_batch_size": 3} | settings))
    old, returns = targets(samples, critic)
    values, expected = by_definition(hf_dir, critic, samples, old, returns)
    for mine_T, theirs_T in zip(critic.compute_values(samples), values, strict=True):
        np.testing.assert_allclose(mine_T, theirs_T, atol=2e-5)
    metrics = step(critic, samples, old, returns)
    assert critic.num_updates == 1 and (expected["train/value_clipfrac"] > 0) == bool(critic.config.value_clip)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=2e-5, abs=2e-5)


def test_loss_and_gradient_do_not_depend_on_packing_or_order(hf_dir: Path) -> None:
    samples = random_samples(2, 6)
    critic = make_critic(hf_dir)
    old, returns = targets(samples, critic)
    metrics, gradients = gradient_step(critic, samples, old, returns)
    assert all(g.abs().max() > 0 for g in gradients)
    for seed, packing in enumerate(({"micro_batch_size": 100}, {"max_tokens_per_gpu": 20})):
        other = make_critic(hf_dir, **packing)
        order = np.random.default_rng(seed).permutation(len(samples))
        again, theirs = gradient_step(other, *([numbers[i] for i in order] for numbers in (samples, old, returns)))
        assert again == pytest.approx(metrics, rel=1e-5, abs=1e-5)
        for mine, other_gradient in zip(gradients, theirs, strict=True):
            torch.testing.assert_close(mine, other_gradient, rtol=1e-5, atol=1e-5)


def test_the_gradient_equals_finite_differences(tmp_path: Path) -> None:
    samples = random_samples(3, 4)
    # an architecture whose norms stay in float64
    critic = make_critic(write_model(tmp_path, "gpt_neox", num_hidden_layers=1), micro_batch_size=2)
    critic.model.double()
    old, returns = targets(samples, critic)
    _, gradients = gradient_step(critic, samples, old, returns)
    generator = torch.Generator().manual_seed(4)
    parameters = list(critic.model.parameters())
    direction = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))
    h, ends = 1e-6, []
    for distance in (h, -2 * h):
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.add_(d, alpha=distance)
        ends.append(step(critic, samples, old, returns)["train/value_loss"])
    assert abs(slope) > 1e-3
    assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(slope, rel=1e-4)


def test_it_starts_at_zero_and_learns_a_constant_return(hf_dir: Path) -> None:
    samples = random_samples(4, 4)
    critic = make_critic(hf_dir, head=False, lr=1e-2, clip_grad=1.0, micro_batch_size=8, value_clip=0.5)
    returns = [np.full(len(sample.token_ids), 0.7) for sample in samples]
    assert not any(values_T.any() for values_T in critic.compute_values(samples))
    for _ in range(30):
        metrics = step(critic, samples, critic.compute_values(samples), returns)
        assert "train/value_explained" not in metrics  # nothing varies that could be explained
    for sample, values_T in zip(samples, critic.compute_values(samples), strict=True):
        np.testing.assert_allclose(values_T[np.asarray(sample.loss_mask) == 1], 0.7, atol=0.1)


@pytest.mark.parametrize(("target", "reason"), [(math.inf, "nonfinite_loss"), (1e19, "nonfinite_gradient")])
def test_what_is_not_finite_never_reaches_the_weights(hf_dir: Path, target: float, reason: str) -> None:
    samples = [make_sample("s0", [5, 6, 7], [0, 1, 1])]
    critic = make_critic(hf_dir, lr=1e-2, clip_grad=1.0)
    before = weights_of(critic)
    metrics = step(critic, samples, critic.compute_values(samples), [np.full(3, target)])
    assert metrics[f"train/critic_skipped_{reason}"] == 1 and critic.skipped_steps == {reason: 1}
    assert all(map(math.isfinite, metrics.values()))
    assert same(weights_of(critic), before) and not critic.optimizer.state


class Watched(ValueTrainer):
    """Remembers what it was told to learn from."""

    seen: list[tuple[float, Arrays]]

    def train_step(self, samples: Any, *, old_values: Any, lr_scale: float, **rest: Any) -> dict[str, float]:
        self.seen.append((lr_scale, old_values))
        return super().train_step(samples, old_values=old_values, lr_scale=lr_scale, **rest)


def make_learner(hf_dir: Path, thread: TorchThread, critic: ValueTrainer | None, **settings: Any) -> Learner:
    config = PolicyConfig(lr=1e-2, device="cpu", micro_batch_size=4, advantages=AdvantageConfig(kind="gae", lambd=0.9))
    return Learner(PolicyTrainer(hf_dir, config), thread, critic=critic, **settings)


def test_the_critic_goes_first_and_its_values_stay_those_before_the_first_update(hf_dir: Path) -> None:
    samples = random_samples(6, 4)
    critic = Watched(hf_dir, CriticConfig(lr=1e-2, device="cpu", micro_batch_size=4))
    critic.seen = []
    with closing(TorchThread()) as thread:
        learner = make_learner(
            hf_dir,
            thread,
            critic,
            schedule=Schedule(warmup=4),
            options=StepOptions(num_critic_only_steps=1),
        )
        before = weights_of(learner.policy)
        alone = asyncio.run(learner.train_rollout(samples, rollout_step=0))
        assert [result.reason for result in alone] == ["critic_only"] and same(weights_of(learner.policy), before)
        assert alone[0].metrics["train/skipped_critic_only"] == 1 and critic.num_updates == 1
        values = critic.compute_values(samples)
        assert all(values_T.any() for values_T in values)
        both = asyncio.run(learner.train_rollout(samples, rollout_step=1, num_steps=2))
    assert not any(result.skipped for result in both) and not same(weights_of(learner.policy), before)
    assert [scale for scale, _ in critic.seen] == pytest.approx([0.25, 0.375, 0.5])
    assert [result.metrics["train/critic_lr"] for result in both] == pytest.approx([0.375e-2, 0.5e-2])
    told = [values_T for _, old in critic.seen[1:] for values_T in old]
    for mine_T, theirs_T in zip(told, values, strict=True):
        np.testing.assert_array_equal(mine_T, theirs_T)


def test_the_critic_learns_what_the_masks_of_the_step_leave(hf_dir: Path) -> None:
    stale = [VersionSpan(start=0, length=1, version=-1), VersionSpan(start=1, length=2, version=0)]
    spans = (*stale, VersionSpan(start=3, length=2, version=3))
    sample = replace(make_sample("s0", [3, 4, 5, 6, 7], [0, 1, 1, 1, 1]), version_spans=spans)
    with closing(TorchThread()) as thread:
        settings = StepOptions(max_token_staleness=2)
        learner = make_learner(hf_dir, thread, make_critic(hf_dir, head=False), options=settings, version=3)
        (result,) = asyncio.run(learner.train_rollout([sample], rollout_step=3))
    # all values are 0, so the returns are credit and discounted credit, of the two fresh tokens alone
    assert result.metrics["train/stale_tokens"] == 2
    assert result.metrics["train/return_mean"] == pytest.approx((1 + 0.9) / 2)
    assert result.metrics["train/value_loss"] == pytest.approx((1 + 0.9**2) / 4)


def test_a_resumed_run_takes_the_step_that_it_would_have_taken(hf_dir: Path, tmp_path: Path) -> None:
    batches = [random_samples(seed, 4) for seed in range(3)]
    settings = {"head": False, "lr": 1e-2, "weight_decay": 0.1, "clip_grad": 1.0, "micro_batch_size": 4}
    with closing(TorchThread()) as thread:

        async def train(learner: Learner, part: Sequence[int]) -> list[dict[str, float]]:
            return [(await learner.train_rollout(batches[i], rollout_step=i))[0].metrics for i in part]

        critic = make_critic(hf_dir, **settings)
        straight = make_learner(hf_dir, thread, critic)
        asyncio.run(train(straight, (0, 1)))
        folder = tmp_path / "step_000002"
        asyncio.run(straight.save(folder, step=1, extra={"next_rollout": 2}))
        expected = asyncio.run(train(straight, (2,)))
        listed = read_state(folder).files
        assert {"critic/model.safetensors", "critic/optimizer.pt", "model.safetensors"} <= listed.keys()

        again = make_critic(hf_dir, **settings)
        resumed = make_learner(hf_dir, thread, again)
        asyncio.run(resumed.load(folder))
        assert resumed.version == 2
        assert again.num_updates == 2 and asyncio.run(train(resumed, (2,))) == expected
        assert same(weights_of(again), weights_of(critic))
        assert same(weights_of(resumed.policy), weights_of(straight.policy))


def test_the_weight_version_counts_updates_and_not_rollout_steps(hf_dir: Path, tmp_path: Path) -> None:
    with closing(TorchThread()) as thread:
        learner = make_learner(hf_dir, thread, make_critic(hf_dir))
        for rollout_step, num_steps in ((7, 1), (7, 2), (9, 1)):  # a step that is trained twice, and one left out
            asyncio.run(learner.train_rollout(random_samples(1, 4), rollout_step=rollout_step, num_steps=num_steps))
        source = asyncio.run(learner.publish())
        assert learner.version == source.version == 3
        asyncio.run(learner.save(tmp_path / "step_000010", step=9, extra={"next_rollout": 10}))
        resumed = make_learner(hf_dir, thread, make_critic(hf_dir))
        asyncio.run(resumed.load(tmp_path / "step_000010"))
        assert resumed.version == 3
        # a checkpoint that was written before there was such a counter
        file = tmp_path / "step_000010" / "trainer_state.json"
        state = json.loads(file.read_text())
        del state["extra"]["weight_version"]
        file.write_text(json.dumps(state))
        asyncio.run(resumed.load(tmp_path / "step_000010"))
        assert resumed.version == 10


def test_a_checkpoint_without_a_critic_or_with_another_is_refused(hf_dir: Path, tmp_path: Path) -> None:
    critic = make_critic(hf_dir)
    with closing(TorchThread()) as thread:
        learner = make_learner(hf_dir, thread, critic)
        learner.policy.save_checkpoint(tmp_path / "step_000001", step=1, extra={})
        with pytest.raises(ConfigError, match=r"step_000001 holds no critic.* with --hf-checkpoint .*step_000001"):
            asyncio.run(learner.load(tmp_path / "step_000001"))
    critic.save(tmp_path / "critic")
    other = write_model(tmp_path / "other")
    with pytest.raises(SilvaError, match="does not fit a critic made from"):
        make_critic(other).load(tmp_path / "critic")
    (tmp_path / "critic" / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(SilvaError, match=r"model\.safetensors cannot be read"):
        critic.load(tmp_path / "critic")


def test_a_critic_that_cannot_work_is_refused(hf_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be trained in packed rows.*carries state"):
        ValueTrainer(write_model(tmp_path, "mamba", state_size=4), CriticConfig(device="cpu"))
    with pytest.raises(SilvaError, match="s9/None holds token id 99; the critic made from"):
        make_critic(hf_dir).compute_values([make_sample("s9", [1, 99, 3], [0, 1, 1])])
