"""Sampling: keyed noise, filters, log-probs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from silva.inference.sampling import RowSampling, log_exponential_noise, position_key, sample, seed_base

CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def splitmix_upper(key: int, counter: int) -> int:
    """The upper 32 bits of splitmix64 at a counter, in plain integers, before its last xor-shift."""
    z = (key + counter * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z >> 32


@settings(max_examples=50, deadline=None)
@given(st.integers(-(2**63), 2**63 - 1))
def test_noise_is_the_documented_hash(key: int) -> None:
    noise = log_exponential_noise([key], 9, CPU)[0].tolist()
    for i, value in enumerate(noise):
        u = min((splitmix_upper(key, i + 1) + 0.5) / 2**32, 1 - 2.0**-24)
        assert value == pytest.approx(math.log(-math.log1p(-u)), abs=2e-6, rel=1e-4)


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -3.0])
    probs = torch.softmax(logits / 0.8, -1).tolist()
    base, n = seed_base("seed", 5), 40_000
    rows = [RowSampling(position_key(base, i), 0.8, 1.0, -1) for i in range(n)]
    ids = torch.tensor(sample(logits.expand(n, -1).contiguous(), rows).ids)
    for i, p in enumerate(probs):
        share = (ids == i).float().mean().item()
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / n), (i, share, p)
    # Neighbouring positions are independent: pairs occur as often as the product says.
    pairs = ((ids[:-1] == 3) & (ids[1:] == 3)).float().mean().item()
    assert abs(pairs - probs[3] ** 2) < 5 * math.sqrt(probs[3] ** 2 / n)


# Steps of 1/64, exact in float32: neighbours that only differ by rounding would make the order a matter of luck.
logits_lists = st.lists(st.integers(-512, 512).map(lambda n: n / 64), min_size=2, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    logits_lists,
    st.floats(0.1, 2.0),
    st.floats(0.05, 1.0),
    st.one_of(st.just(-1), st.integers(1, 12)),
    st.integers(0, 2**60),
)
def test_filters_and_logprobs_against_plain_arithmetic(
    values: list[float], temperature: float, top_p: float, top_k: int, seed: int
) -> None:
    scaled = [v / temperature for v in values]
    top = max(scaled)
    total = sum(math.exp(s - top) for s in scaled)
    probs = [math.exp(s - top) / total for s in scaled]
    order = sorted(range(len(values)), key=lambda i: -values[i])
    kept = order[:top_k] if top_k > 0 else order
    mass, chosen = sum(probs[i] for i in kept), kept
    if top_p < 1:
        sums = [sum(probs[i] for i in kept[:n]) for n in range(len(kept) + 1)]
        assume(all(abs(value - top_p * mass) > 1e-5 for value in sums))  # else rounding decides
        chosen = kept[: next(n for n, value in enumerate(sums) if value >= top_p * mass)]
    logits = torch.tensor([values] * 20)
    rows = [RowSampling(position_key(seed, i), temperature, top_p, top_k) for i in range(20)]
    got = sample(logits, rows)
    for id_, logprob, kept_mass in zip(got.ids, got.logprobs, got.kept_mass, strict=True):
        assert logprob == pytest.approx(math.log(probs[id_]), abs=1e-4)
        assert any(values[id_] == values[i] for i in chosen)
        assert kept_mass == pytest.approx(sum(probs[i] for i in chosen), abs=1e-5)
        if top_p == 1 and (top_k == -1 or top_k >= len(values)):
            assert kept_mass == 1.0


def test_temperature_zero_is_argmax_with_logprobs_at_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    got = sample(logits, [RowSampling(1, 0.0, 0.1, 1), RowSampling(2, 0.0, 1.0, -1)])
    assert got.ids == [1, 0]
    assert got.kept_mass == [1.0, 1.0]
    assert got.logprobs == pytest.approx(torch.log_softmax(logits, -1)[[0, 1], [1, 0]].tolist())


def test_a_row_does_not_depend_on_its_mates() -> None:
    logits = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0))
    kinds = [(0.7, 0.9, -1), (1.0, 1.0, -1), (0.0, 1.0, -1), (1.3, 0.8, 5)]
    rows = [RowSampling(position_key(i, i), *kinds[i % 4]) for i in range(300)]
    together = sample(logits, rows)
    for i in range(0, 300, 7):
        alone = sample(logits[i : i + 1], rows[i : i + 1])
        assert (alone.ids[0], alone.kept_mass[0]) == (together.ids[i], together.kept_mass[i])


def test_logits_that_are_not_finite_show_in_the_logprob() -> None:
    logits = torch.tensor([[0.0, float("nan")], [0.0, float("inf")], [0.0, 1.0]])
    got = sample(logits, [RowSampling(i, 1.0, 0.9, -1) for i in range(3)])
    assert [math.isfinite(x) for x in got.logprobs] == [False, False, True]


def test_seeds_of_any_kind_give_different_streams() -> None:
    bases = {seed_base("seed", s) for s in (0, 1, -1, 2**80, -(2**80))} | {seed_base("request", 0, "r\udc80")}
    assert len(bases) == 6
    assert len({position_key(b, p) for b in bases for p in range(100)}) == 600
