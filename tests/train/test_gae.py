from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from train_tiny import make_sample

from silva.train.advantages import AdvantageConfig, token_advantages
from silva.train.signals import PerSample, Signals
from silva.types.rollout import TrainingSample

UNIT = st.floats(0, 1)
NUMBER = st.floats(-3, 3, width=32)


@st.composite
def contexts(draw: st.DrawFn) -> TrainingSample:
    """Sampled tokens with gaps between them; the responses differ in credit."""
    mask = [0, *draw(st.lists(st.integers(0, 1), min_size=1, max_size=9).filter(any))]
    sample = make_sample("s", list(range(len(mask))), mask, credit=draw(NUMBER))
    if draw(st.booleans()):
        credits = draw(st.lists(NUMBER, min_size=len(sample.responses), max_size=len(sample.responses)))
        sample = replace(sample, response_credits=tuple(credits))
    return sample


def credit_at(sample: TrainingSample, t: int) -> float:
    """The credit of the response that holds token t."""
    if sample.response_credits is None:
        assert sample.credit is not None
        return sample.credit
    (credit,) = (
        credit
        for span, credit in zip(sample.responses, sample.response_credits, strict=True)
        if span.start <= t < span.start + span.length
    )
    return credit


def by_definition(
    places: list[int], sample: TrainingSample, kl_T: NDArray, values_T: NDArray, config: AdvantageConfig
) -> list[float]:
    """The double sum of GAE over the trained tokens alone, for each with the credit of its own response at the end."""
    advantages: list[float] = []
    for k in range(len(places)):
        total = 0.0
        for j in range(k, len(places)):
            last = j == len(places) - 1
            reward = -config.kl_coef * kl_T[places[j]] + (credit_at(sample, places[k]) if last else 0.0)
            next_value = 0.0 if last else values_T[places[j + 1]]
            delta = reward + config.gamma * next_value - values_T[places[j]]
            total += (config.gamma * config.lambd) ** (j - k) * delta
        advantages.append(total)
    return advantages


@settings(max_examples=40)
@given(
    sample=contexts(),
    config=st.builds(AdvantageConfig, kind=st.just("gae"), gamma=UNIT, lambd=UNIT, kl_coef=st.sampled_from([0.0, 0.3])),
    seed=st.integers(0, 2**32 - 1),
)
def test_gae_is_its_double_sum_over_the_trained_tokens(
    sample: TrainingSample, config: AdvantageConfig, seed: int
) -> None:
    length = len(sample.token_ids)
    rng = np.random.default_rng(seed)
    values_T, old_T, reference_T = rng.normal(size=(3, length))
    kept = [t for t in range(length) if sample.loss_mask[t] and rng.random() < 0.8]
    mask = [int(t in kept) for t in range(length)]
    for numbers_T in (values_T, old_T, reference_T):  # nothing is read where nothing is trained
        numbers_T[[t for t in range(length) if t not in kept]] = math.nan
    signals = Signals(old=[old_T], reference=[reference_T], values=[values_T])
    made = token_advantages([sample], config, signals, loss_masks=[mask])
    expected = by_definition(kept, sample, old_T - reference_T, values_T, config)
    assert made.returns is not None
    np.testing.assert_allclose(made.advantages[0][kept], expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(made.returns[0][kept], np.array(expected) + values_T[kept], rtol=1e-9, atol=1e-9)
    for numbers in (made.advantages, made.returns):
        assert not elsewhere(numbers, kept).any()


def test_whitening_leaves_what_the_critic_learns_as_it_is() -> None:
    samples = [make_sample(f"s{i}", [1] * 4, [0, 1, 0, 1], credit=2.0 * i) for i in range(2)]
    signals = Signals(values=[np.full(4, 0.5), np.full(4, -0.25)])
    plain = token_advantages(samples, AdvantageConfig(kind="gae"), signals)
    white = token_advantages(samples, AdvantageConfig(kind="gae", whiten=True), signals)
    assert plain.returns is not None and white.returns is not None
    for mine_T, theirs_T, credit in zip(white.returns, plain.returns, (0.0, 2.0), strict=True):
        assert mine_T.tolist() == theirs_T.tolist() == [0.0, credit, 0.0, credit]
    # credit minus value: -0.5 and 2.25, twice each
    half = 1.375 / (4 * 1.375**2 / 3 + 1e-8) ** 0.5
    assert [a[1] for a in white.advantages] == [a[3] for a in white.advantages] == pytest.approx([-half, half])


def elsewhere(numbers: PerSample, kept: list[int]) -> NDArray:
    return np.delete(numbers[0], kept)
