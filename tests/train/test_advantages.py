"""Advantages of tokens against naive references: one token at a time, observations and all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from contexts import context, forked
from hypothesis import given
from hypothesis import strategies as st
from train_tiny import make_sample

from silva.credit.shared import spread_credits
from silva.train.advantages import AdvantageConfig, SequenceNumbers, returns, token_advantages, whiten
from silva.train.signals import Signals
from silva.types.rollout import TrainingSample

JUNK = [float("nan"), float("inf"), -1e300]
"""What may stand at tokens that are not trained."""


def naive_returns(sample: TrainingSample, kl: Sequence[float], config: AdvantageConfig) -> list[float]:
    """R_t = x_t + gamma R_{t+1}, from the last token to the first; observations hand R on as it is."""
    rewards = [-config.kl_coef * k for k in kl]
    last = max(t for t, bit in enumerate(sample.loss_mask) if bit)
    assert sample.credit is not None
    rewards[last] += sample.credit
    out, later = [0.0] * len(kl), 0.0
    for t in reversed(range(len(kl))):
        if sample.loss_mask[t]:
            later = out[t] = rewards[t] + config.gamma * later
    return out


@given(
    st.lists(st.tuples(st.integers(0, 1), st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=12),
    st.floats(-5, 5),
    st.sampled_from([0.0, 0.3, 0.95, 1.0]),
    st.sampled_from([0.0, 0.1]),
)
def test_returns_pass_over_what_was_not_sampled(
    tokens: list[tuple[int, float, float]], credit: float, gamma: float, kl_coef: float
) -> None:
    mask = [0, *(bit for bit, _, _ in tokens), 1]
    sample = make_sample("s", [1] * len(mask), mask, credit=credit)
    clean = [np.array([0.5, *column, -0.5]) for column in list(zip(*tokens, strict=True))[1:]]
    config = AdvantageConfig(kind="returns", gamma=gamma, kl_coef=kl_coef)
    expected = naive_returns(sample, (clean[0] - clean[1]).tolist(), config)
    dirty = [np.where(np.array(mask) == 1, values_T, np.resize(JUNK, len(mask))) for values_T in clean]
    made = token_advantages([sample], config, Signals(old=[dirty[0]], reference=[dirty[1]]))
    np.testing.assert_allclose(made.advantages[0], expected, rtol=1e-12, atol=1e-12)
    assert made.returns is None and (made.advantages[0][np.array(mask) == 0] == 0).all()


def test_each_response_sees_its_own_credit_come_at_the_end() -> None:
    credit_N = np.array([1.0, 1.0, 0.0, -2.0])
    found_N = returns(SequenceNumbers(credit_N=credit_N), AdvantageConfig(kind="returns", gamma=0.5))
    assert found_N.tolist() == [0.125, 0.25, 0.0, -2.0]
    # linear in the credits: the sum of two runs is the run of the sum
    half_N = returns(SequenceNumbers(credit_N=credit_N / 2), AdvantageConfig(kind="returns", gamma=0.5))
    assert (2 * half_N).tolist() == found_N.tolist()


@pytest.mark.parametrize("kind", ["credit", "returns"])
def test_opposite_credits_over_a_shared_turn_leave_exactly_nothing_there(kind: str) -> None:
    samples = spread_credits(forked("g-s", "ab"), [1.0, -1.0])
    config = AdvantageConfig(kind=kind, gamma=0.9)  # type: ignore[arg-type]
    first_T, second_T = token_advantages(samples, config, Signals()).advantages
    start, stop = samples[0].responses[0].start, samples[0].responses[1].start
    assert (first_T[start:stop] == 0).all()
    assert first_T[stop:].tolist() == [1.0]
    assert second_T.sum() == pytest.approx(-1.9 if kind == "returns" else -2.0)


def test_masks_given_beside_the_samples_decide_what_is_last() -> None:
    sample = make_sample("s", [1] * 5, [0, 1, 1, 1, 1], credit=8.0)
    config = AdvantageConfig(kind="returns", gamma=0.5)
    (advantages_T,) = token_advantages([sample], config, Signals(), loss_masks=[[0, 1, 0, 1, 0]]).advantages
    assert advantages_T.tolist() == [0.0, 4.0, 0.0, 8.0, 0.0]


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=5), max_size=5))
def test_whitening_is_over_all_tokens_together(parts: list[list[float]]) -> None:
    found = whiten([np.array(part, dtype=np.float64) for part in parts])
    assert [len(part_N) for part_N in found] == [len(part) for part in parts]
    joined = [value for part in parts for value in part]
    if len(set(joined)) < 2:
        assert all((part_N == 0).all() for part_N in found)
        return
    mean = sum(joined) / len(joined)
    variance = sum((value - mean) ** 2 for value in joined) / (len(joined) - 1)
    expected = [(value - mean) / (variance + 1e-8) ** 0.5 for value in joined]
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-9, atol=1e-8)
    backwards = whiten([np.array(part[::-1], dtype=np.float64) for part in parts[::-1]])
    np.testing.assert_allclose(np.concatenate(backwards)[::-1], expected, rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("values", [[[0.1] * 3, [0.1] * 7], [[2.5]], [[]], []])
def test_whitening_of_what_does_not_differ_is_exactly_zero(values: list[list[float]]) -> None:
    assert [part_N.tolist() for part_N in whiten([np.array(part) for part in values])] == [
        [0.0] * len(part) for part in values
    ]


def test_whitening_counts_each_trainable_token_once_and_no_other() -> None:
    samples = [context("g-a", None, [(2, 3)]), context("g-b", None, [(2, 1), (4, 2)], trained={4})]
    samples = [replace(sample, credit=credit) for sample, credit in zip(samples, (1.0, -1.0), strict=True)]
    first_T, second_T = token_advantages(samples, AdvantageConfig(whiten=True), Signals()).advantages
    mean, variance = 0.2, (3 * 0.8**2 + 2 * 1.2**2) / 4
    assert first_T[first_T != 0].tolist() == pytest.approx([0.8 / (variance + 1e-8) ** 0.5] * 3)
    assert second_T[second_T != 0].tolist() == pytest.approx([(-1 - mean) / (variance + 1e-8) ** 0.5] * 2)
