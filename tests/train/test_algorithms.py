"""Every algorithm from its options to the gradient, and the table that they stand in."""

from __future__ import annotations

import asyncio
import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from train_steps import (
    TokenLoss,
    defined_step,
    make_trainer,
    old_policy,
    ppo_clip_of_token,
    step_with_gradients,
    surrogate,
)
from train_tiny import random_samples, write_least_model

from silva.config.options import RunConfig
from silva.config.parse import from_values
from silva.config.training_checks import check_algorithm
from silva.credit.assign import assign_group_credit
from silva.run.build_learner import policy_config
from silva.run.settings import credit_of
from silva.train.advantages import TokenAdvantages
from silva.train.algorithms import ALGORITHMS, SPECIAL_OPTIONS, Algorithm
from silva.train.learner import Learner, TorchThread
from silva.train.losses.gspo import gspo
from silva.train.objective import ObjectiveConfig
from silva.train.options import ClipOptions, KlOptions, TisOptions
from silva.train.policy import PolicyTrainer
from silva.train.signals import Signals
from silva.types.rollout import TrainingSample

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"
Credit = Callable[[float, list[float]], float]
"""Credit of a session: of its reward and those of its group, itself among them."""


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_least_model(tmp_path_factory.mktemp("model"), vocab_size=48, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def trainer(hf_dir: Path) -> PolicyTrainer:
    """Its learning rate is 0, so that one will do for all tests; each gives it the config it needs."""
    return make_trainer(hf_dir)


def grpo(reward: float, group: list[float]) -> float:
    return float((reward - np.mean(group)) / (np.std(group, ddof=1) + 1e-6))


def distance(reward: float, group: list[float]) -> float:
    return float(reward - np.mean(group))


def gspo_of_token(
    new: torch.Tensor, old: float, advantage: float, mean: torch.Tensor, clip: ClipOptions
) -> tuple[torch.Tensor, bool]:
    """The value of the sequence's ratio, with the gradient of the token's own log-prob."""
    return surrogate(mean.detach().exp() * (new - new.detach()).exp(), advantage, clip)


def cispo_of_token(
    new: torch.Tensor, old: float, advantage: float, _: torch.Tensor, clip: ClipOptions
) -> tuple[torch.Tensor, bool]:
    ratio = math.exp(new.item() - old)
    weight = min(max(ratio, 1 - clip.eps_clip), 1 + (clip.eps_clip_high or clip.eps_clip))
    return -weight * advantage * new, weight != ratio


def sapo_of_token(
    new: torch.Tensor, old: float, advantage: float, _: torch.Tensor, __: ClipOptions
) -> tuple[torch.Tensor, bool]:
    tau = 1.0 if advantage > 0 else 1.05
    return -4 / tau / (1 + torch.exp(-tau * ((new - old).exp() - 1))) * advantage, False


def reinforce_of_token(
    new: torch.Tensor, _: float, advantage: float, __: torch.Tensor, ___: ClipOptions
) -> tuple[torch.Tensor, bool]:
    return -advantage * new, False


DEFINED: dict[str, tuple[Credit, TokenLoss]] = {
    "grpo": (grpo, ppo_clip_of_token),
    "rloo": (lambda r, group: r - (sum(group) - r) / (len(group) - 1), reinforce_of_token),
    "reinforce_plus_plus": (lambda r, _: r, ppo_clip_of_token),
    "reinforce_plus_plus_baseline": (distance, ppo_clip_of_token),
    "maxrl": (lambda r, group: distance(r, group) / float(np.mean(group)), ppo_clip_of_token),
    "gspo": (grpo, gspo_of_token),
    "cispo": (grpo, cispo_of_token),
    "sapo": (grpo, sapo_of_token),
}
WHITENED = {"reinforce_plus_plus", "reinforce_plus_plus_baseline"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"eps_clip_high": 0.28, "eps_clip_c": 1.3}),
    ("grpo", {"normalize_advantages": True, "disable_grpo_std_normalization": True, "rollout_temperature": 0.7}),
    ("reinforce_plus_plus", {"gamma": 0.9, "kl_coef": 0.2, "loss_reduction": "per_token"}),
    ("gspo", {"eps_clip": 0.05}),
    ("cispo", {"eps_clip_high": 0.3}),
    *((name, {}) for name in ("rloo", "reinforce_plus_plus_baseline", "maxrl", "sapo")),
]
PACKINGS = ({}, {"max_tokens_per_gpu": 32})


def rewarded(seed: int = 1) -> list[TrainingSample]:
    """Samples of two groups of three sessions with positive rewards."""
    rng = np.random.default_rng(seed)
    rewards = {f"s{i}": float(rng.exponential()) for i in range(6)}
    return [
        replace(sample, reward=rewards[sample.session_id], group_id=f"g{int(sample.session_id[1:]) % 2}")
        for sample in random_samples(seed, 6)
    ]


def options(hf_dir: Path, name: str, **more: object) -> RunConfig:
    """Options of a run with the algorithm; a name that came after the options is taken as well."""
    config = from_values({"hf_checkpoint": str(hf_dir), "lr": 0.0, "rollout_max_response_len": 16, **more})
    config = replace(config, advantage_estimator=name)
    check_algorithm(config)
    return config


def configure(trainer: PolicyTrainer, config: RunConfig, **packing: Any) -> None:
    trainer.config = replace(policy_config(config), device="cpu", clip_grad=0.0, **packing)


def defined_advantages(
    name: str, samples: Sequence[TrainingSample], signals: Signals, config: RunConfig
) -> list[list[float]]:
    """Of the trainable tokens of each sample, from the rewards."""
    groups: dict[str, dict[str, float]] = {}
    for sample in samples:
        assert sample.reward is not None
        groups.setdefault(sample.group_id, {})[sample.session_id] = sample.reward
    credit = distance if config.disable_grpo_std_normalization else DEFINED[name][0]
    out: list[list[float]] = []
    for i, sample in enumerate(samples):
        group = groups[sample.group_id]
        tokens = np.flatnonzero(sample.loss_mask)
        later = credit(group[sample.session_id], list(group.values()))
        values = [later] * len(tokens)
        if name == "reinforce_plus_plus":
            assert signals.old is not None and signals.reference is not None
            kl = (signals.old[i] - signals.reference[i])[tokens]
            for n in reversed(range(len(tokens))):
                later = (1.0 if n == len(tokens) - 1 else config.gamma) * later - config.kl_coef * kl[n]
                values[n] = later
        out.append(values)
    if name in WHITENED or config.normalize_advantages:
        joined = np.concatenate(out)
        out = [list((np.array(v) - joined.mean()) / np.sqrt(joined.var(ddof=1) + 1e-8)) for v in out]
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_step_equals_its_definition_however_it_is_packed(
    trainer: PolicyTrainer, hf_dir: Path, name: str, more: dict[str, Any]
) -> None:
    config = options(hf_dir, name, **more)
    samples, _ = assign_group_credit(rewarded(), credit_of=credit_of(config))
    old = old_policy(samples, trainer, spread=0.3)
    signals = Signals(old=old, reference=old_policy(samples, trainer, spread=0.2) if config.kl_coef else None)
    names = {id(p): key for key, p in trainer.model.named_parameters()}
    order_of = [names[id(p)] for group in trainer.optimizer.param_groups for p in group["params"]]
    first: tuple[dict[str, float], list[torch.Tensor]] | None = None
    for seed, packing in enumerate(PACKINGS):
        configure(trainer, config, **packing)
        order = np.random.default_rng(seed).permutation(len(samples)).tolist()
        shuffled = [samples[i] for i in order]
        result, gradient = step_with_gradients(trainer, shuffled, signals=signals.of(order))
        assert not result.skipped
        if first is None:
            first = result.metrics, gradient
            continue
        assert result.metrics == pytest.approx(first[0], rel=1e-5, abs=1e-5)
        for mine, theirs in zip(gradient, first[1], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert first is not None
    expected = defined_step(
        hf_dir,
        samples,
        old,
        trainer.config,
        token_loss=DEFINED[name][1],
        advantages=defined_advantages(name, samples, signals, config),
    )
    assert expected.metrics["grad_norm"] > 0.01
    assert name in ("rloo", "sapo") or 0 < expected.metrics["pg_clipfrac"] < 1
    for key, value in expected.metrics.items():
        assert first[0][f"train/{key}"] == pytest.approx(value, rel=2e-5, abs=2e-5), key
    for key, mine in zip(order_of, first[1], strict=True):
        torch.testing.assert_close(mine.double(), expected.gradient[key], rtol=1e-4, atol=2e-5, msg=key)


def test_every_algorithm_but_that_with_a_critic_is_in_the_cases() -> None:
    assert {name for name, _ in CASES} == {name for name, row in ALGORITHMS.items() if row.advantages != "gae"}


ALL_TERMS = ObjectiveConfig(
    policy_loss=gspo,
    clip=ClipOptions(eps_clip_c=1.5),
    tis=TisOptions(tis_level="geometric", tis_mode="mask", tis_clip_low=0.2, tis_clip=5.0),
    opsm_delta=0.3,
    entropy_coef=0.1,
    kl=KlOptions(kl_loss_coef=0.2, kl_loss_type="k3", use_unbiased_kl=True),
    opd_coef=0.3,
)


def near_policy(seed: int, trainer: PolicyTrainer) -> list[TrainingSample]:
    """Samples that an engine close to the policy sampled, so that TIS and OPSM leave most of them in."""
    samples = random_samples(seed)
    recorded = old_policy(samples, trainer, spread=0.5)
    return [replace(s, logprobs=(lp * s.loss_mask).tolist()) for s, lp in zip(samples, recorded, strict=True)]


def test_what_stands_at_masked_tokens_changes_nothing(trainer: PolicyTrainer, hf_dir: Path) -> None:
    base = policy_config(options(hf_dir, "reinforce_plus_plus", gamma=0.9, kl_coef=0.1, micro_batch_size=3))
    trainer.config = replace(base, device="cpu", objective=ALL_TERMS)
    samples = near_policy(2, trainer)
    clean = {
        name: old_policy(samples, trainer, spread=0.1 * i) for i, name in enumerate(("old", "reference", "teacher"))
    }
    junk = [math.nan, math.inf, -math.inf, 1e30, -1e30]

    def dirty(values: Sequence[Any], i: int) -> np.ndarray:
        mask_T = np.array(samples[i].loss_mask) == 1
        return np.where(mask_T, values, np.roll(np.resize(junk, len(mask_T)), i))

    first = step_with_gradients(trainer, samples, signals=Signals(**clean))
    spoilt = [replace(s, logprobs=dirty(s.logprobs, i).tolist()) for i, s in enumerate(samples)]
    signals = Signals(**{name: [dirty(v, i) for i, v in enumerate(arrays)] for name, arrays in clean.items()})
    second = step_with_gradients(trainer, spoilt, signals=signals)
    assert second[0] == first[0] and 0 < first[0].metrics["train/opsm_clipfrac"] < 1
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(second[1], first[1], strict=True))
    given = [np.ones(len(s.token_ids)) for s in samples]
    third, fourth = (
        step_with_gradients(trainer, samples, signals=signals, advantages=TokenAdvantages(advantages=arrays))
        for arrays in (given, [dirty(v, i) for i, v in enumerate(given)])
    )
    assert third[0] == fourth[0] and third[0].metrics["train/grad_norm"] > 0
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(third[1], fourth[1], strict=True))


def test_bfloat16_computes_every_term(hf_dir: Path, trainer: PolicyTrainer) -> None:
    samples = near_policy(2, trainer)
    signals = Signals(**{name: old_policy(samples, trainer, spread=0.1) for name in ("old", "reference", "teacher")})
    trainer.config = replace(policy_config(options(hf_dir, "gspo")), device="cpu", objective=ALL_TERMS)
    wide = trainer.train_step(samples, signals=signals).metrics
    narrow = make_trainer(hf_dir, dtype="bfloat16", objective=ALL_TERMS, lr=1e-3)
    before = [p.detach().clone() for p in narrow.model.parameters()]
    result = narrow.train_step(samples, signals=signals)
    assert not result.skipped and result.metrics.keys() == wide.keys()
    for name in ("loss", "pg_loss", "kl_loss", "opd_loss", "entropy", "grad_norm"):
        assert result.metrics[f"train/{name}"] == pytest.approx(wide[f"train/{name}"], rel=0.1, abs=0.05), name
        assert result.metrics[f"train/{name}"] != wide[f"train/{name}"]
    assert all(p.dtype == torch.float32 for p in narrow.model.parameters())
    assert any(not torch.equal(p, q) for p, q in zip(narrow.model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_resolves_and_names_options_that_exist(name: str) -> None:
    row = ALGORITHMS[name]
    loss = row.policy_loss()
    assert row.name == name and f"{loss.__module__}:{loss.__name__}" == row.loss
    assert row.options <= {item.name for item in fields(RunConfig)}
    assert len(row.credit([0.0, 1.0])) == 2
    # what looks at the ratio heeds where its range ends, or says how it does without
    assert row.ratio or not row.options & {"eps_clip", "eps_clip_high", "eps_clip_c"}


@pytest.mark.parametrize("name", [name for name, row in ALGORITHMS.items() if row.advantages != "gae"])
def test_a_row_heeds_the_options_that_it_names_and_no_other(trainer: PolicyTrainer, hf_dir: Path, name: str) -> None:
    other = {
        **{"eps_clip": 0.01, "eps_clip_high": 0.01, "eps_clip_c": 1.01, "disable_grpo_std_normalization": True},
        **{"kl_coef": 0.5, "gamma": 0.5},
    }
    samples = rewarded()
    old = old_policy(samples, trainer, spread=0.5)
    signals = Signals(old=old, reference=[np.zeros(len(values)) for values in old])

    def loss(config: RunConfig) -> float:
        configure(trainer, config, micro_batch_size=100)
        credited, _ = assign_group_credit(samples, credit_of=credit_of(config))
        return trainer.train_step(credited, signals=signals, measure_only=True).metrics["train/loss"]

    plain = options(hf_dir, name)
    usual = loss(plain)
    changed = {option for option, value in other.items() if loss(replace(plain, **{option: value})) != usual}
    assert changed == ALGORITHMS[name].options
    assert changed <= other.keys() < SPECIAL_OPTIONS


def test_the_documented_example_of_an_own_algorithm_trains(hf_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, row = re.search(
        r"## Add your own\n.*?```python\n(.*?)```.*?```python\n(.*?)```", DOCS.read_text(), re.S
    ).groups()
    module = ModuleType("silva.train.losses.spo")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(file, "docs/algorithms.md", "exec"), module.__dict__)
    newcomer: Algorithm = eval(row.strip().rstrip(","), vars(sys.modules["silva.train.algorithms"]) | {})
    monkeypatch.setitem(ALGORITHMS, newcomer.name, newcomer)
    config = options(hf_dir, newcomer.name, disable_grpo_std_normalization=True)
    learning = make_trainer(hf_dir, objective=policy_config(config).objective, lr=1e-2, clip_grad=1.0)
    samples, _ = assign_group_credit(rewarded(), credit_of=credit_of(config))
    with closing(TorchThread()) as thread:
        first, second = asyncio.run(Learner(learning, thread).train_rollout(samples, rollout_step=0, num_steps=2))
    assert not first.skipped and not second.skipped and learning.num_updates == 2
    assert second.metrics["train/ppo_kl"] != 0


def test_the_docs_list_every_algorithm() -> None:
    text = DOCS.read_text()
    table = re.search(r"## Which one when\n.*?\n(\|.*?)\n\n", text, re.S)
    assert table is not None
    rows = [re.match(r"\| `(\w+)` \|", line) for line in table.group(1).splitlines()[2:]]
    assert [row.group(1) for row in rows if row] == list(ALGORITHMS)
    for row, line in zip(ALGORITHMS.values(), table.group(1).splitlines()[2:], strict=True):
        heeded = line.split("|")[5]
        assert {name.replace("-", "_") for name in re.findall(r"--([\w-]+)", heeded)} == row.options, row.name
