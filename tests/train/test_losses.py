from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from silva.train.losses.clip import ClipConfig
from silva.train.losses.ppo_clip import ppo_clip
from silva.train.losses.tokens import clamp_log_ratio, token_entropy, token_logprobs
from silva.types.errors import ConfigError

CLIPS = [ClipConfig(), ClipConfig(eps=0.2, eps_high=0.28), ClipConfig(eps=0.1, eps_high=0.3, dual_clip=1.5)]
NONE_N = torch.zeros(0, dtype=torch.int64)
"""For losses that do not look at sequences."""
logprob = st.floats(-30, 0)
token = st.tuples(logprob, logprob, st.floats(-5, 5))


def reference_ppo_clip(new: float, old: float, advantage: float, clip: ClipConfig) -> tuple[float, bool]:
    """The definition, one token at a time."""
    rho = math.exp(min(max(new - old, -20.0), 20.0))
    high = clip.eps if clip.eps_high is None else clip.eps_high
    plain = -rho * advantage
    clipped = -min(max(rho, 1 - clip.eps), 1 + high) * advantage
    loss = max(plain, clipped)
    if clip.dual_clip is not None and advantage < 0:
        loss = min(-clip.dual_clip * advantage, loss)
    return loss, clipped > plain


def float64(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@given(st.lists(token, min_size=1, max_size=8), st.sampled_from(CLIPS))
def test_ppo_clip_equals_its_definition(tokens: list[tuple[float, float, float]], clip: ClipConfig) -> None:
    new_N, old_N, advantages_N = (float64(column) for column in zip(*tokens, strict=True))
    loss_N, clipped_N = ppo_clip(new_N, old_N, advantages_N, NONE_N, clip)
    expected = [reference_ppo_clip(*values, clip) for values in tokens]
    np.testing.assert_allclose(loss_N.numpy(), [loss for loss, _ in expected], rtol=1e-12, atol=1e-300)
    assert clipped_N.tolist() == [won for _, won in expected]


@pytest.mark.parametrize("clip", CLIPS)
def test_gradient_of_ppo_clip_equals_finite_differences(clip: ClipConfig) -> None:
    rng = np.random.default_rng(3)
    # log-ratios away from the corners of the clip range, on both sides of each
    ratios_N = float64([-30.0, -1.0, -0.15, 0.0, 0.1, 0.7, 3.0, 30.0] * 2)
    old_N = float64(-rng.exponential(size=16) - 1)
    advantages_N = float64([1.3] * 8 + [-0.7] * 8)
    new_N = (old_N + ratios_N).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: ppo_clip(x, old_N, advantages_N, NONE_N, clip)[0], (new_N,), eps=1e-7, atol=1e-6
    )


def test_dual_clip_bounds_what_a_bad_token_can_cost() -> None:
    loss_N, _ = ppo_clip(float64([0.0]), float64([-10.0]), float64([-2.0]), NONE_N, ClipConfig(dual_clip=3.0))
    assert loss_N.tolist() == [6.0]


def test_log_ratios_are_clamped() -> None:
    assert clamp_log_ratio(float64([90.0, -99.0, 0.5])).tolist() == [20.0, -20.0, 0.5]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_logprobs_and_entropy_equal_a_float64_softmax(temperature: float) -> None:
    rng = np.random.default_rng(5)
    logits_NV = rng.normal(size=(2500, 11)) * 8
    targets_N = rng.integers(0, 11, 2500)
    z = np.exp(logits_NV / temperature - (logits_NV / temperature).max(axis=1, keepdims=True))
    p_NV = z / z.sum(axis=1, keepdims=True)
    expected = np.log(p_NV[np.arange(2500), targets_N])
    entropy = -(p_NV * np.log(p_NV)).sum(axis=1)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        logits = torch.tensor(logits_NV, dtype=dtype)
        mine = token_logprobs(logits, torch.from_numpy(targets_N), temperature)
        np.testing.assert_allclose(mine.numpy(), expected, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(token_entropy(logits, temperature).numpy(), entropy, rtol=tolerance, atol=tolerance)


def test_temperature_zero_is_scored_at_one() -> None:
    logits_NV = torch.tensor([[1.0, 2.0, 3.0]])
    targets_N = torch.tensor([1])
    assert torch.equal(token_logprobs(logits_NV, targets_N, 0.0), token_logprobs(logits_NV, targets_N, 1.0))


def test_low_precision_logits_are_scored_in_float32() -> None:
    logits_NV = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    assert token_logprobs(logits_NV, torch.tensor([1]), 0.7).dtype == torch.float32


def test_entropy_is_finite_where_the_model_rules_ids_out() -> None:
    entropy_N = token_entropy(torch.tensor([[0.0, 0.0, -math.inf]]), 1.0)
    assert entropy_N.tolist() == pytest.approx([math.log(2)])


@pytest.mark.parametrize("bad", [{"eps": 0.0}, {"eps": 1.0}, {"eps_high": -0.1}, {"dual_clip": 1.0}, {"eps": math.nan}])
def test_impossible_clip_ranges_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(bad.values())))):
        ClipConfig(**bad)
