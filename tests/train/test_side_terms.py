"""KL to a reference model and on-policy distillation: their formulas, and steps and runs with such models beside."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_tiny import make_sample, random_samples, write_model
from transformers import AutoModelForCausalLM

from silva.train.advantages import AdvantageConfig
from silva.train.learner import Learner, LocalScorer, TorchThread
from silva.train.losses.distillation import distillation
from silva.train.losses.kl import kl_estimate
from silva.train.objective import ObjectiveConfig, RowTokens, row_loss
from silva.train.options import KlOptions, KlType, TisOptions
from silva.train.packed_model import PackedModel
from silva.train.policy import PolicyConfig, PolicyTrainer
from silva.train.signals import PerSample, Signals
from silva.types.errors import RunStopped
from silva.types.rollout import TrainingSample

KINDS: tuple[KlType, ...] = ("k1", "k2", "k3", "low_var_kl")


def float64(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def reference_kl(new: float, reference: float, kind: str) -> float:
    """The definition of one token."""
    d = new - reference
    if kind in ("k1", "k2"):
        return d if kind == "k1" else d * d / 2
    d = min(max(d, -20.0), 20.0)
    return min(max(math.exp(-d) - 1 + d, -10.0), 10.0)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_equals_its_definition(kind: KlType) -> None:
    rng = np.random.default_rng(1)
    # from equal to so far apart that differences, and k3 itself, are clamped
    new = [*(-rng.exponential(2, size=30)), 0.0, -30.0, -1.0]
    reference = [*(-rng.exponential(2, size=30)), -30.0, 0.0, -1.0]
    old = [*(-rng.exponential(2, size=30)), -25.0, -1.0, -1.0]
    expected = [reference_kl(n, r, kind) for n, r in zip(new, reference, strict=True)]
    new_N, reference_N, old_N = float64(new), float64(reference), float64(old)
    np.testing.assert_allclose(kl_estimate(new_N, reference_N, kind).numpy(), expected, rtol=1e-12)
    config = ObjectiveConfig(kl=KlOptions(kl_loss_coef=1.0, kl_loss_type=kind, use_unbiased_kl=True))
    ones_N = torch.ones_like(new_N)
    tokens = row_tokens(new_N, old_N=old_N, reference_N=reference_N, weights_N=ones_N, rollout_N=old_N)
    total = sum(math.exp(min(max(n - o, -20.0), 20.0)) * kl for n, o, kl in zip(new, old, expected, strict=True))
    assert float(row_loss(tokens, config)[1]["kl_loss"]) == pytest.approx(total, rel=1e-12)


def softmax_at(theta_V: torch.Tensor) -> torch.Tensor:
    return theta_V.log_softmax(dim=0)


def true_kl_slope(theta_V: torch.Tensor, other_V: torch.Tensor, h: float = 1e-6) -> torch.Tensor:
    """Gradient of KL(softmax(theta) | other) by finite differences."""

    def kl(at_V: torch.Tensor) -> float:
        logs_V = softmax_at(at_V)
        return float((logs_V.exp() * (logs_V - other_V)).sum())

    steps = torch.eye(len(theta_V), dtype=torch.float64) * h
    return float64([(kl(theta_V + step) - kl(theta_V - step)) / (2 * h) for step in steps])


def expected_slope(theta_V: torch.Tensor, weights_V: torch.Tensor, loss: Any) -> torch.Tensor:
    """Gradient of the mean of a token loss over tokens drawn with `weights_V`."""
    at_V = theta_V.clone().requires_grad_()
    (weights_V * loss(softmax_at(at_V))).sum().backward()
    assert at_V.grad is not None
    return at_V.grad


def test_unbiased_kl_and_distillation_have_the_gradient_of_the_true_kl() -> None:
    rng = np.random.default_rng(2)
    theta_V, old_V, other_V = (float64(rng.normal(size=6) * 0.6) for _ in range(3))
    new_V, old_V, other_V = softmax_at(theta_V), softmax_at(old_V), softmax_at(other_V)
    truth_V = true_kl_slope(theta_V, other_V)
    for kind in ("k1", "k3"):
        slope_V = expected_slope(
            theta_V, old_V.exp(), lambda logs_V, k=kind: kl_estimate(logs_V, other_V, k, (logs_V - old_V).exp())
        )
        torch.testing.assert_close(slope_V, truth_V, rtol=1e-6, atol=1e-8, msg=kind)
    slope_V = expected_slope(theta_V, new_V.exp(), lambda logs_V: distillation(logs_V, other_V))
    torch.testing.assert_close(slope_V, truth_V, rtol=1e-6, atol=1e-8)
    # without the ratio k1 has no slope in the mean at all, and k2 that of the true KL
    k1_V = expected_slope(theta_V, new_V.exp(), lambda logs_V: kl_estimate(logs_V, other_V, "k1"))
    torch.testing.assert_close(k1_V, torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-12)
    k2_V = expected_slope(theta_V, new_V.exp(), lambda logs_V: kl_estimate(logs_V, other_V, "k2"))
    torch.testing.assert_close(k2_V, truth_V, rtol=1e-6, atol=1e-8)


def row_tokens(new_N: torch.Tensor, **more: Any) -> RowTokens:
    rng = np.random.default_rng(6)
    n = len(new_N)
    old_N = new_N.detach() - torch.linspace(-0.6, 0.55, n, dtype=torch.float64)  # away from the corners of the clip
    fields: dict[str, Any] = {
        "entropy_N": -new_N.detach(),
        "rollout_N": old_N,
        "advantages_N": float64(rng.normal(size=n)),
        "credits_N": torch.ones(n, dtype=torch.float64),
        "weights_N": float64(rng.uniform(0.1, 1, size=n)),
        "sequence_N": torch.zeros(n, dtype=torch.int64),
        "old_N": old_N,
        "reference_N": new_N.detach() + float64(rng.normal(size=n)),
    }
    return RowTokens(new_N=new_N, **(fields | more))


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_the_kl_term_equals_finite_differences(kind: KlType, unbiased: bool) -> None:
    start_N = float64([-1.0, -0.2, -3.0, -0.5, -2.0, -1.5])
    fixed = row_tokens(start_N)
    config = ObjectiveConfig(kl=KlOptions(kl_loss_coef=0.7, kl_loss_type=kind, use_unbiased_kl=unbiased))
    assert torch.autograd.gradcheck(
        lambda new_N: row_loss(replace(fixed, new_N=new_N), config)[0],
        (start_N.clone().requires_grad_(),),
        eps=1e-7,
        atol=1e-6,
    )


@pytest.mark.parametrize("by", ["opsm", "tis", "function"])
def test_what_is_rejected_keeps_its_side_terms(by: str) -> None:
    new_N = float64([-1.0, -2.0, -0.5, -1.5]).requires_grad_()
    entropy_N = float64([1.0, 2.0, 3.0, 4.0]).requires_grad_()
    rollout_N = float64([-1.0, -2.0, 1.5, 0.5])  # the second sequence is two further off, a token
    config = ObjectiveConfig(kl=KlOptions(kl_loss_coef=0.3, kl_loss_type="k2"), entropy_coef=0.1, opd_coef=0.2)
    extra: dict[str, Any] = {}
    if by == "opsm":
        config = replace(config, opsm_delta=1.0)
    elif by == "tis":
        config = replace(config, tis=TisOptions(tis_level="geometric", tis_mode="mask", tis_clip_low=0.5))
    else:
        extra = {"tis_weights_N": float64([1.0, 1.0, 0.0, 0.0])}
    tokens = row_tokens(
        new_N,
        entropy_N=entropy_N,
        rollout_N=rollout_N,
        old_N=new_N.detach(),
        advantages_N=float64([1.0, 1.0, -1.0, -1.0]),
        credits_N=float64([1.0, 1.0, -1.0, -1.0]),
        weights_N=float64([0.25] * 4),
        sequence_N=torch.tensor([0, 0, 1, 1]),
        reference_N=new_N.detach() - float64([0.1, 0.2, 0.3, 0.4]),
        teacher_N=new_N.detach() - float64([0.5, 0.6, 0.7, 0.8]),
        **extra,
    )
    loss, sums = row_loss(tokens, config)
    loss.backward()
    assert float(sums["kept"]) == 2 and new_N.grad is not None and entropy_N.grad is not None
    policy_N = float64([-1.0, -1.0, 0.0, 0.0])  # in value and gradient: the ratio is 1
    side_N = 0.3 * float64([0.1, 0.2, 0.3, 0.4]) + 0.2 * float64([0.5, 0.6, 0.7, 0.8])  # gradients
    torch.testing.assert_close(new_N.grad, 0.25 * (policy_N + side_N))
    torch.testing.assert_close(entropy_N.grad, torch.full_like(new_N, -0.025))
    kl, entropy, opd = 0.3 * 0.30 / 2, 0.1 * 10.0, 0.2 * -(0.5 + 1.2 + 0.35 + 1.2)
    assert loss.item() == pytest.approx(0.25 * (-2 + kl - entropy + opd))


def test_what_the_teacher_did_not_score_has_no_term_and_no_gradient() -> None:
    new_N = float64([-1.0, -0.2, -3.0, -0.5]).requires_grad_()
    teacher_N = float64([-2.0, math.nan, -math.inf, -0.1])
    tokens = row_tokens(new_N, teacher_N=teacher_N, advantages_N=torch.zeros(4, dtype=torch.float64))
    loss, sums = row_loss(tokens, ObjectiveConfig(opd_coef=0.5))
    loss.backward()
    assert new_N.grad is not None
    scored_N = float64([1.0, 0, 0, -0.4])  # sg(new - teacher)
    torch.testing.assert_close(new_N.grad, 0.5 * scored_N * tokens.weights_N)
    assert float(sums["opd_loss"]) == pytest.approx(float((scored_N * new_N.detach() * tokens.weights_N).sum()))
    assert float(sums["opd_kl"]) == pytest.approx(0.6) and float(sums["opd_scored"]) == 2


def test_a_kl_that_is_only_measured_stays_out_of_the_loss() -> None:
    new_N = float64([-1.0, -0.2])
    fixed = row_tokens(new_N, reference_N=float64([-math.inf, -0.1]))
    loss, sums = row_loss(fixed, ObjectiveConfig(kl=KlOptions(kl_loss_coef=0.0)))
    assert torch.isfinite(loss) and not torch.isfinite(sums["kl_loss"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three models of one vocabulary and different weights."""
    made: dict[str, Path] = {}
    for name, spread in (("policy", 0.3), ("reference", 0.25), ("teacher", 0.35)):
        made[name] = write_model(tmp_path_factory.mktemp(name), initializer_range=spread)
    return made


def make_trainer(folder: Path, **settings: Any) -> PolicyTrainer:
    return PolicyTrainer(folder, PolicyConfig(**({"lr": 0.0, "clip_grad": 0.0, "device": "cpu"} | settings)))


def eager_logprobs(folder: Path, samples: Sequence[TrainingSample], temperature: float) -> list[np.ndarray]:
    """Log-probs [T, V] of the token at each place: float64, transformers' own attention, one sample at a time."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64)
    out: list[np.ndarray] = []
    for sample in samples:
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([sample.token_ids])).logits[0].numpy() / temperature
        logs_TV = logits_TV - logits_TV.max(axis=1, keepdims=True)
        logs_TV -= np.log(np.exp(logs_TV).sum(axis=1, keepdims=True))
        out.append(np.concatenate([np.full((1, logs_TV.shape[1]), np.nan), logs_TV[:-1]]))
    return out


ALL_TERMS = ObjectiveConfig(
    kl=KlOptions(kl_loss_coef=0.3, kl_loss_type="k3", use_unbiased_kl=True),
    entropy_coef=0.05,
    opd_coef=0.2,
    rollout_as_old=False,
)


def definition(
    folders: dict[str, Path], samples: Sequence[TrainingSample], old: PerSample, config: PolicyConfig
) -> dict[str, float]:
    """Loss and metrics of a step with all side terms (session_mean), one token at a time."""
    logs = {name: eager_logprobs(folder, samples, config.rollout_temperature) for name, folder in folders.items()}
    terms: dict[str, dict[str, list[float]]] = {}
    kl, objective = config.objective.kl, config.objective
    assert kl is not None
    for i, sample in enumerate(samples):
        assert sample.credit is not None
        mine = terms.setdefault(sample.session_id, {n: [] for n in ("pg", "kl", "entropy", "opd", "opd_kl")})
        for t in np.flatnonzero(sample.loss_mask):
            of = {name: float(logs[name][i][t, sample.token_ids[t]]) for name in folders}
            rho = math.exp(min(max(of["policy"] - float(old[i][t]), -20.0), 20.0))
            clipped = min(max(rho, 0.8), 1.2)
            all_V = logs["policy"][i][t]
            mine["pg"].append(max(-rho * sample.credit, -clipped * sample.credit))
            mine["kl"].append(
                (rho if kl.use_unbiased_kl else 1.0) * reference_kl(of["policy"], of["reference"], kl.kl_loss_type)
            )
            mine["entropy"].append(-float((np.exp(all_V) * all_V).sum()))
            mine["opd"].append((of["policy"] - of["teacher"]) * of["policy"])
            mine["opd_kl"].append(of["policy"] - of["teacher"])

    def session_mean(name: str) -> float:
        return float(np.mean([np.mean(mine[name]) for mine in terms.values()]))

    loss = session_mean("pg") + kl.kl_loss_coef * session_mean("kl")
    loss += -objective.entropy_coef * session_mean("entropy") + objective.opd_coef * session_mean("opd")
    opd_kl = np.mean([value for mine in terms.values() for value in mine["opd_kl"]])
    means = {"pg_loss": session_mean("pg"), "kl_loss": session_mean("kl"), "opd_loss": session_mean("opd")}
    return {"loss": loss, "opd_kl": float(opd_kl)} | means


def side_signals(folders: dict[str, Path], samples: Sequence[TrainingSample], config: PolicyConfig) -> Signals:
    rng = np.random.default_rng(9)
    scores = {name: frozen(folder, config).compute_logprobs(samples) for name, folder in folders.items()}
    old = [values + rng.normal(size=len(values)) * 0.3 for values in scores["policy"]]
    return Signals(old=old, reference=scores["reference"], teacher=scores["teacher"])


def frozen(folder: Path, config: PolicyConfig) -> PackedModel:
    return PackedModel(folder, config, frozen=True)


def test_a_step_with_all_side_terms_equals_its_definition(folders: dict[str, Path]) -> None:
    samples = random_samples(1, 5)
    trainer = make_trainer(folders["policy"], objective=ALL_TERMS, rollout_temperature=0.7, micro_batch_size=3)
    signals = side_signals(folders, samples, trainer.config)
    assert signals.old is not None
    metrics = trainer.train_step(samples, signals=signals).metrics
    for name, value in definition(folders, samples, signals.old, trainer.config).items():
        assert metrics[f"train/{name}"] == pytest.approx(value, rel=2e-5, abs=2e-5), name


def test_side_terms_do_not_depend_on_packing_or_order(folders: dict[str, Path]) -> None:
    samples = random_samples(2, 5)
    seen: list[tuple[dict[str, float], list[torch.Tensor]]] = []
    all_signals = side_signals(folders, samples, make_trainer(folders["policy"]).config)
    for seed, packing in enumerate(({}, {"micro_batch_size": 3}, {"max_tokens_per_gpu": 30})):
        trainer = make_trainer(folders["policy"], objective=ALL_TERMS, **packing)
        order = np.random.default_rng(seed).permutation(len(samples)).tolist() if seed else range(len(samples))
        signals = all_signals.of(order)
        gradients: list[torch.Tensor] = []
        trainer.optimizer.register_step_pre_hook(
            lambda optimizer, *_, into=gradients: into.extend(
                p.grad.clone() for group in optimizer.param_groups for p in group["params"]
            )
        )
        seen.append((trainer.train_step([samples[i] for i in order], signals=signals).metrics, gradients))
    for metrics, gradients in seen[1:]:
        assert metrics == pytest.approx(seen[0][0], rel=1e-5, abs=1e-5)
        for mine, first in zip(gradients, seen[0][1], strict=True):
            torch.testing.assert_close(mine, first, rtol=1e-5, atol=1e-5)


class Fixed:
    """A scorer that knows its answer; `spoil` (sample index, place, value) overwrites some of it."""

    def __init__(self, scores: PerSample, *spoil: tuple[int, int, float]):
        self._scores = [np.array(values, dtype=np.float64) for values in scores]
        for i, place, value in spoil:
            self._scores[i][place] = value

    async def score(self, samples: Sequence[TrainingSample]) -> PerSample:
        assert len(samples) == len(self._scores), "these tests take one step a rollout"
        return self._scores


def rollout(trainer: PolicyTrainer, samples: Sequence[TrainingSample], num_steps: int = 1, **beside: Any):
    """What the steps on one rollout gave, with these models beside the policy."""
    with closing(TorchThread()) as thread:
        learner = Learner(trainer, thread, **beside)
        return asyncio.run(learner.train_rollout(samples, rollout_step=0, num_steps=num_steps))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kl_to_a_reference_with_the_same_weights_is_exactly_zero(folders: dict[str, Path], dtype: str) -> None:
    objective = ObjectiveConfig(kl=KlOptions(kl_loss_coef=0.1, kl_loss_type="k2"), opd_coef=0.1)
    trainer = make_trainer(folders["policy"], objective=objective, dtype=dtype, micro_batch_size=3, lr=1e-2)
    reference = frozen(folders["policy"], trainer.config)
    with closing(TorchThread()) as thread:
        scorer = LocalScorer(reference, thread)
        first, second = rollout(trainer, random_samples(6, 6), 2, reference=scorer, teacher=scorer)
    assert first.metrics["train/kl_loss"] == first.metrics["train/opd_kl"] == first.metrics["train/ppo_kl"] == 0
    assert second.metrics["train/kl_loss"] > 1e-6
    assert not any(p.requires_grad or p.grad is not None for p in reference.model.parameters())
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert held.isdisjoint(map(id, reference.model.parameters()))


def test_the_reward_side_kl_equals_its_definition(folders: dict[str, Path]) -> None:
    samples = random_samples(4, 4)
    advantages = AdvantageConfig(kind="returns", kl_coef=0.2, gamma=0.9)
    trainer = make_trainer(folders["policy"], advantages=advantages)
    old = trainer.compute_logprobs(samples)
    reference = frozen(folders["reference"], trainer.config).compute_logprobs(samples)
    (result,) = rollout(trainer, samples, reference=Fixed(reference))
    losses: dict[str, list[float]] = {}
    kls: list[float] = []
    for sample, old_T, reference_T in zip(samples, old, reference, strict=True):
        places = np.flatnonzero(sample.loss_mask)
        k1 = [float(old_T[t]) - float(reference_T[t]) for t in places]
        kls += k1
        for n in range(len(places)):
            rewards = [-0.2 * value for value in k1]
            rewards[-1] += sample.credit or 0.0
            losses.setdefault(sample.session_id, []).append(
                -sum(0.9**m * reward for m, reward in enumerate(rewards[n:]))
            )
    assert result.metrics["train/kl_reward"] == pytest.approx(float(np.mean(kls)), rel=1e-5)
    assert result.metrics["train/pg_loss"] == pytest.approx(np.mean([np.mean(x) for x in losses.values()]), rel=1e-5)


@pytest.mark.parametrize(("how", "bad"), [("loss", -math.inf), ("reward", math.nan)])
def test_a_sample_that_the_reference_cannot_score_is_not_trained_and_the_run_goes_on(
    folders: dict[str, Path], how: str, bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    samples = [make_sample(f"s{i}", [3, 4 + i, 5, 6], [0, 1, 0, 1], credit=1.0 - i) for i in range(3)]
    settings: dict[str, Any] = {"objective": ObjectiveConfig(kl=KlOptions(kl_loss_coef=0.1, kl_loss_type="k3"))}
    if how == "reward":
        settings = {"advantages": AdvantageConfig(kind="returns", kl_coef=0.1, whiten=True)}
    trainer = make_trainer(folders["policy"], lr=1e-2, **settings)
    scores = trainer.compute_logprobs(samples)
    (result,) = rollout(trainer, samples, reference=Fixed(scores, (1, 0, bad), (2, 3, bad)))
    assert not result.skipped and result.metrics["train/reference_unscored"] == 1
    assert result.num_trainable == 4 and result.metrics["train/empty_sessions"] == 1
    assert all(math.isfinite(value) for value in result.metrics.values())
    if how == "reward":  # its mean is over what is left, whose reference is the policy itself
        assert result.metrics["train/kl_reward"] == pytest.approx(0, abs=1e-6)
    assert f"session s2 is not trained: the reference model gives its token 3 (id 6) the log-prob {bad}" in caplog.text
    (result,) = rollout(trainer, samples, reference=Fixed(scores, *((i, 1, bad) for i in range(3))))
    assert result.reason == "no_trainable_tokens" and result.metrics["train/reference_unscored"] == 3
    assert trainer.num_updates == 1


def test_a_sample_that_the_teacher_cannot_score_loses_its_distillation_alone(folders: dict[str, Path]) -> None:
    samples = [make_sample(f"s{i}", [3, 4, 5, 6 + i][: 4 - i], [0, 1, 1, 1][: 4 - i]) for i in range(2)]
    trainer = make_trainer(folders["policy"], objective=ObjectiveConfig(opd_coef=0.5))
    teacher = frozen(folders["teacher"], trainer.config)
    mine, theirs = (model.compute_logprobs(samples) for model in (trainer, teacher))
    with closing(TorchThread()) as thread:
        (result,) = rollout(trainer, samples, teacher=LocalScorer(teacher, thread, max_len=3))
        with pytest.raises(RunStopped, match=r"the teacher X could not score any of the 1 samples .* has 4 tokens"):
            rollout(trainer, samples[:1], teacher=LocalScorer(teacher, thread, max_len=3, name="the teacher X"))
    difference_N = mine[1][1:].astype(float) - theirs[1][1:]
    assert result.metrics["train/opd_unscored"] == 1 and result.num_trainable == 5
    assert result.metrics["train/opd_kl"] == pytest.approx(difference_N.mean(), rel=1e-4)
    assert result.metrics["train/opd_loss"] == pytest.approx((difference_N * mine[1][1:]).mean() / 2, rel=1e-4)
    (result,) = rollout(trainer, samples, teacher=Fixed(theirs, (0, 2, -math.inf)))
    assert result.metrics["train/opd_unscored"] == 1
    assert result.metrics["train/opd_kl"] == pytest.approx(difference_N.mean(), rel=1e-4)
