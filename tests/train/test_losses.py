"""Every loss of single tokens against its definition, one token at a time in float64, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from silva.train.losses.cispo import cispo
from silva.train.losses.clip import PolicyLoss, clamp_ratio
from silva.train.losses.gspo import gspo
from silva.train.losses.ppo_clip import ppo_clip
from silva.train.losses.reinforce import reinforce
from silva.train.losses.sapo import sapo
from silva.train.losses.tokens import clamp_log_ratio, sequence_mean, sequence_sum, token_entropy, token_logprobs
from silva.train.options import ClipOptions

PLAIN = ClipOptions()
UNEVEN = ClipOptions(eps_clip=0.2, eps_clip_high=0.28)
DUAL = ClipOptions(eps_clip=0.1, eps_clip_high=0.3, eps_clip_c=1.5)
CLIPS = [PLAIN, UNEVEN, DUAL]
Defined = Callable[[float, float, float, float, ClipOptions], tuple[float, bool]]
"""Loss of a token and whether the clip range decided: of its new and old log-prob, its advantage and the mean of
(new - old) over its sequence."""


def bounded(difference: float) -> float:
    return min(max(difference, -20.0), 20.0)


def moved(ratio: float, clip: ClipOptions) -> float:
    return min(max(ratio, 1 - clip.eps_clip), 1 + (clip.eps_clip if clip.eps_clip_high is None else clip.eps_clip_high))


def surrogate(ratio: float, advantage: float, clip: ClipOptions) -> tuple[float, bool]:
    plain, clipped = -ratio * advantage, -moved(ratio, clip) * advantage
    loss = max(plain, clipped)
    if clip.eps_clip_c is not None and advantage < 0:
        loss = min(-clip.eps_clip_c * advantage, loss)
    return loss, clipped > plain


def defined_cispo(new: float, old: float, advantage: float, _: float, clip: ClipOptions) -> tuple[float, bool]:
    ratio = math.exp(bounded(new - old))
    return -moved(ratio, clip) * advantage * new, moved(ratio, clip) != ratio


def defined_sapo(new: float, old: float, advantage: float, _: float, __: ClipOptions) -> tuple[float, bool]:
    tau = 1.0 if advantage > 0 else 1.05
    x = tau * (math.exp(bounded(new - old)) - 1)
    return -4 / tau * advantage / (1 + math.exp(-min(x, 700.0))), False


DEFINED: dict[PolicyLoss, Defined] = {
    ppo_clip: lambda new, old, advantage, _, clip: surrogate(math.exp(bounded(new - old)), advantage, clip),
    gspo: lambda new, old, advantage, mean, clip: surrogate(math.exp(bounded(mean)), advantage, clip),
    cispo: defined_cispo,
    sapo: defined_sapo,
    reinforce: lambda new, old, advantage, _, clip: (-advantage * new, False),
}
by_loss = pytest.mark.parametrize("loss", DEFINED, ids=lambda loss: loss.__name__)


def float64(values: object) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.float64)


def tokens(num: int = 300) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """new, old, advantages, sequences: ratios on both sides of all bounds and beyond the clamp, credit of any sign."""
    rng = np.random.default_rng(7)
    sequence_N = np.sort(rng.integers(0, num // 6, num))
    sequence_N = np.unique(sequence_N, return_inverse=True)[1]
    centre_N = rng.choice([0.0, -0.3, 0.3, -1.0, 1.0, 25.0, -25.0], num)[sequence_N]
    old_N = -rng.exponential(size=num) * 3
    advantages_N = rng.choice([1.0, 1.0, -1.0, -1.0, 0.0], num) * rng.exponential(size=num)
    order = rng.permutation(num)  # the tokens of a sequence need not lie together
    columns = (old_N + centre_N + rng.normal(size=num) * 0.1, old_N, advantages_N)
    return *(float64(column[order]) for column in columns), torch.from_numpy(sequence_N[order])


@by_loss
@pytest.mark.parametrize("clip", CLIPS)
def test_a_policy_loss_equals_its_definition(loss: PolicyLoss, clip: ClipOptions) -> None:
    new_N, old_N, advantages_N, sequence_N = tokens()
    loss_N, clipped_N = loss(new_N, old_N, advantages_N, sequence_N, clip)
    of_sequence: dict[int, list[float]] = {}
    for sequence, new, old in zip(sequence_N.tolist(), new_N.tolist(), old_N.tolist(), strict=True):
        of_sequence.setdefault(sequence, []).append(new - old)
    columns = zip(new_N.tolist(), old_N.tolist(), advantages_N.tolist(), sequence_N.tolist(), strict=True)
    expected = [DEFINED[loss](n, o, a, float(np.mean(of_sequence[s])), clip) for n, o, a, s in columns]
    np.testing.assert_allclose(loss_N.numpy(), [value for value, _ in expected], rtol=1e-12, atol=1e-300)
    assert clipped_N.tolist() == [won for _, won in expected]
    assert loss in (sapo, reinforce) or 0 < sum(clipped_N.tolist()) < len(expected)
    narrow_N, _ = loss(new_N.float(), old_N.float(), advantages_N.float(), sequence_N, clip)
    np.testing.assert_allclose(narrow_N.numpy(), loss_N.numpy(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("loss", [ppo_clip, sapo, reinforce], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("clip", CLIPS)
def test_gradients_without_a_stop_equal_finite_differences(loss: PolicyLoss, clip: ClipOptions) -> None:
    # log-ratios away from the corners of the clip ranges, on both sides of each
    ratios_N = float64([-30.0, -1.0, -0.15, 0.0, 0.1, 0.35, 0.7, 1.5, 30.0] * 2)
    old_N = float64(-np.random.default_rng(3).exponential(size=18) - 1)
    advantages_N = float64([1.3] * 9 + [-0.7] * 9)
    new_N = (old_N + ratios_N).requires_grad_()
    none_N = torch.zeros(0, dtype=torch.int64)
    assert torch.autograd.gradcheck(
        lambda x: loss(x, old_N, advantages_N, none_N, clip)[0], (new_N,), eps=1e-7, atol=1e-6
    )


@pytest.mark.parametrize("clip", CLIPS)
def test_the_gradient_of_gspo_is_that_of_the_ratio_of_whole_sequences(clip: ClipOptions) -> None:
    new_N, old_N, advantages_N, sequence_N = tokens(120)
    advantages_N = sequence_mean(advantages_N, sequence_N)  # one credit a sequence, as in the paper
    new_N.requires_grad_()
    gspo(new_N, old_N, advantages_N, sequence_N, clip)[0].sum().backward()

    def whole(new_N: torch.Tensor) -> torch.Tensor:
        """Each sequence's surrogate, whose ratio passes the gradient to all its tokens, times its length."""
        parts: list[torch.Tensor] = []
        for sequence in range(int(sequence_N.max()) + 1):
            mine_N = sequence_N == sequence
            s, advantage = clamp_log_ratio((new_N - old_N)[mine_N].mean()).exp(), advantages_N[mine_N][0]
            loss = torch.maximum(-s * advantage, -clamp_ratio(s, clip) * advantage)
            if clip.eps_clip_c is not None and advantage < 0:
                loss = torch.minimum(-clip.eps_clip_c * advantage, loss)
            parts.append(loss * mine_N.sum())
        return torch.stack(parts)

    free_N = new_N.detach().clone().requires_grad_()
    whole(free_N).sum().backward()
    assert new_N.grad is not None and free_N.grad is not None
    np.testing.assert_allclose(new_N.grad.numpy(), free_N.grad.numpy(), rtol=1e-10, atol=1e-300)
    assert 0 < int((new_N.grad == 0).sum()) < len(new_N)
    h, rng = 1e-6, np.random.default_rng(1)
    direction_N = float64(rng.normal(size=len(new_N)))
    with torch.no_grad():
        slopes = (whole(new_N + h * direction_N) - whole(new_N - h * direction_N)) / (2 * h)
    expected = torch.zeros_like(slopes).index_add(0, sequence_N, new_N.grad * direction_N)
    np.testing.assert_allclose(slopes.numpy(), expected.numpy(), rtol=1e-5, atol=1e-8)


def test_in_gspo_each_token_has_the_gradient_of_its_own_advantage() -> None:
    new_N, old_N = float64([-1.0, -2.0, -0.5]).requires_grad_(), float64([-1.1, -2.0, -0.4])
    loss_N, _ = gspo(new_N, old_N, float64([1.0, -2.0, 3.0]), torch.tensor([0, 0, 1]), PLAIN)
    loss_N.sum().backward()
    first, second = math.exp((0.1 + 0.0) / 2), math.exp(-0.1)
    assert new_N.grad is not None
    assert new_N.grad.tolist() == pytest.approx([-first, 2 * first, -3 * second], rel=1e-12)


def test_in_cispo_every_token_keeps_the_gradient_of_its_clipped_weight() -> None:
    new_N, old_N, advantages_N, sequence_N = tokens()
    new_N.requires_grad_()
    cispo(new_N, old_N, advantages_N, sequence_N, UNEVEN)[0].sum().backward()
    weights = [moved(math.exp(bounded(d)), UNEVEN) for d in (new_N - old_N).tolist()]
    assert new_N.grad is not None
    np.testing.assert_allclose(new_N.grad.numpy(), -np.asarray(weights) * advantages_N.numpy(), rtol=1e-12)


def test_dual_clip_bounds_what_a_bad_token_can_cost() -> None:
    none_N = torch.zeros(0, dtype=torch.int64)
    loss_N, _ = ppo_clip(float64([0.0]), float64([-10.0]), float64([-2.0]), none_N, ClipOptions(eps_clip_c=3.0))
    assert loss_N.tolist() == [6.0]


def test_log_ratios_are_clamped() -> None:
    assert clamp_log_ratio(float64([90.0, -99.0, 0.5])).tolist() == [20.0, -20.0, 0.5]


def test_sums_of_sequences_reach_all_their_tokens() -> None:
    sequence_N = torch.tensor([1, 0, 1, 2])
    assert sequence_sum(float64([1, 2, 4, 8]), sequence_N).tolist() == [5, 2, 5, 8]
    assert sequence_mean(float64([1, 2, 4, 8]), sequence_N).tolist() == [2.5, 2, 2.5, 8]
    assert sequence_mean(float64([]), sequence_N[:0]).tolist() == []


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_logprobs_and_entropy_equal_a_float64_softmax_with_its_gradient(temperature: float) -> None:
    rng = np.random.default_rng(5)
    logits_NV = rng.normal(size=(1100, 11)) * 8  # more rows than entropy takes at once
    logits_NV[::3, 4] = -np.inf  # ids that the model rules out
    targets_N = rng.integers(5, 11, 1100)
    z = np.exp(logits_NV / temperature - (logits_NV / temperature).max(axis=1, keepdims=True))
    p_NV = z / z.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        logs_NV = np.where(p_NV > 0, np.log(p_NV), 0.0)
    entropy_N = -(p_NV * logs_NV).sum(axis=1)
    chosen_NV = np.eye(11)[targets_N]
    expected = {
        token_logprobs: (logs_NV[np.arange(1100), targets_N], (chosen_NV - p_NV) / temperature),
        token_entropy: (entropy_N, -p_NV * (logs_NV + entropy_N[:, None]) / temperature),
    }
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        logits = torch.tensor(logits_NV, dtype=dtype).requires_grad_()
        mine = {
            token_logprobs: token_logprobs(logits, torch.from_numpy(targets_N), temperature),
            token_entropy: token_entropy(logits, temperature),
        }
        for function, (values_N, gradient_NV) in expected.items():
            np.testing.assert_allclose(mine[function].detach().numpy(), values_N, rtol=tolerance, atol=tolerance)
            (gradient,) = torch.autograd.grad(mine[function].sum(), logits)
            np.testing.assert_allclose(gradient.numpy(), gradient_NV, rtol=tolerance, atol=tolerance)
            assert (gradient[::3, 4] == 0).all()
        with torch.no_grad():
            assert torch.equal(token_entropy(logits, temperature), mine[token_entropy])


def test_the_gradient_of_entropy_equals_finite_differences() -> None:
    logits_NV = float64(np.random.default_rng(2).normal(size=(3, 4)) * 2).requires_grad_()
    ruled_out = float64([0.0, -math.inf, 0.0, 0.0])
    assert torch.autograd.gradcheck(lambda x: token_entropy(x + ruled_out, 0.8), (logits_NV,))


def test_temperature_zero_is_scored_at_one() -> None:
    logits_NV = torch.tensor([[1.0, 2.0, 3.0]])
    targets_N = torch.tensor([1])
    assert torch.equal(token_logprobs(logits_NV, targets_N, 0.0), token_logprobs(logits_NV, targets_N, 1.0))


def test_low_precision_logits_are_scored_in_float32() -> None:
    logits_NV = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    assert token_logprobs(logits_NV, torch.tensor([1]), 0.7).dtype == torch.float32
