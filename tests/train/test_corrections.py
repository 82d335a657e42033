"""TIS and OPSM against their definitions, token by token; and what they leave out stays out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from silva.train.algorithms import ALGORITHMS
from silva.train.corrections import opsm_dropped, tis_ratio, tis_weights
from silva.train.losses.reinforce import reinforce
from silva.train.objective import ObjectiveConfig, RowTokens, row_loss
from silva.train.options import TisLevel, TisMode, TisOptions

LEVELS, MODES = get_args(TisLevel), get_args(TisMode)
logprob = st.floats(-60, 0)
sequences = st.lists(
    st.tuples(st.floats(-2, 2), st.lists(st.tuples(logprob, logprob), min_size=1, max_size=5)), min_size=1, max_size=4
)
"""Per sequence: its credit, and (one log-prob, the recorded one) of each token."""
bands = st.sampled_from([(0.0, 2.0), (0.5, 1.5), (1.0, 3.0), (0.0, 1.0), (0.25, 1e9)])


def float64(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def flat(drawn: list[tuple[float, list[tuple[float, float]]]]) -> tuple[torch.Tensor, ...]:
    """All tokens of some sequences: one log-prob, the recorded one, credit, number of the sequence."""
    rows = [(one, rec, credit, s) for s, (credit, tokens) in enumerate(drawn) for one, rec in tokens]
    one_N, rec_N, credit_N, sequence_N = zip(*rows, strict=True)
    return float64(one_N), float64(rec_N), float64(credit_N), torch.tensor(sequence_N)


def ratio_by_definition(tokens: list[tuple[float, float]], at: int, level: str) -> float:
    if level == "token":
        difference = tokens[at][0] - tokens[at][1]
    else:
        difference = math.fsum(old - recorded for old, recorded in tokens)
        difference /= len(tokens) if level == "geometric" else 1
    return math.exp(max(-20.0, min(20.0, difference)))


@settings(max_examples=30)
@given(sequences, st.sampled_from(LEVELS), st.sampled_from(MODES), bands)
@example([(1.0, [(-30.0, -1.0), (-1.0, -30.0)])], "token", "truncate", (0.0, 2.0))
@example([(1.0, [(-1.0, -30.0)]), (1.0, [(-2.0, -2.0)])], "sequence", "mask", (0.0, 2.0))
def test_tis_equals_its_definition(drawn: Any, level: Any, mode: Any, band: tuple[float, float]) -> None:
    old_N, recorded_N, _, sequence_N = flat(drawn)
    config = TisOptions(tis_clip_low=band[0], tis_clip=band[1], tis_level=level, tis_mode=mode)
    ratio_N = tis_ratio(old_N, recorded_N, sequence_N, level)
    expected = [ratio_by_definition(tokens, at, level) for _, tokens in drawn for at in range(len(tokens))]
    np.testing.assert_allclose(ratio_N.numpy(), expected, rtol=1e-9)
    for weight, ratio in zip(tis_weights(ratio_N, config).tolist(), ratio_N.tolist(), strict=True):
        outside = 0.0 if mode == "mask" else min(max(ratio, band[0]), band[1])
        assert weight == (ratio if band[0] <= ratio <= band[1] else outside)


@settings(max_examples=30)
@given(st.lists(st.lists(logprob, min_size=1, max_size=6), min_size=1, max_size=4), st.sampled_from(LEVELS))
def test_equal_policies_weigh_exactly_one_in_any_band(drawn: list[list[float]], level: Any) -> None:
    values_N = torch.tensor([value for tokens in drawn for value in tokens], dtype=torch.float32)
    sequence_N = torch.tensor([s for s, tokens in enumerate(drawn) for _ in tokens])
    ratio_N = tis_ratio(values_N, values_N.clone(), sequence_N, level)
    for config in (
        TisOptions(),
        TisOptions(tis_clip_low=1.0, tis_clip=2.0, tis_mode="mask"),
        TisOptions(tis_clip_low=0.5, tis_clip=1.0, tis_mode="mask"),
    ):
        assert tis_weights(ratio_N, config).tolist() == [1.0] * len(values_N)


@settings(max_examples=30)
@given(sequences, st.sampled_from([0.0, 1e-4, 0.5, 30.0]))
def test_opsm_equals_its_definition(drawn: Any, delta: float) -> None:
    new_N, recorded_N, credits_N, sequence_N = flat(drawn)
    expected: list[bool] = []
    for credit, tokens in drawn:
        gap = math.fsum(recorded - new for new, recorded in tokens) / len(tokens)
        if abs(gap - delta) < 1e-9:
            return  # rounding decides
        expected += [credit < 0 and gap > delta] * len(tokens)
    assert opsm_dropped(new_N, recorded_N, credits_N, sequence_N, delta).tolist() == expected


def test_no_tokens_are_no_trouble() -> None:
    none_N, no_sequence_N = float64([]), torch.zeros(0, dtype=torch.int64)
    for level in LEVELS:
        assert tis_ratio(none_N, none_N, no_sequence_N, level).shape == (0,)
    assert opsm_dropped(none_N, none_N, none_N, no_sequence_N, 0.1).shape == (0,)


def test_the_ends_of_a_band_are_inside_of_it() -> None:
    ratio_N = torch.tensor([0.1, 0.5, 1.1, 1.2])
    band = TisOptions(tis_clip_low=0.5, tis_clip=1.1, tis_mode="mask")
    assert tis_weights(ratio_N, band).tolist() == pytest.approx([0.0, 0.5, 1.1, 0.0])
    truncated = tis_weights(ratio_N, replace(band, tis_mode="truncate"))
    assert truncated.tolist() == pytest.approx([0.5, 0.5, 1.1, 1.1])


def row(new: list[float], recorded: list[float], advantages: list[float], sequence: list[int], **more: Any):
    new_N = torch.tensor(new, requires_grad=True)
    tokens = RowTokens(
        new_N=new_N,
        entropy_N=torch.zeros(len(new)),
        rollout_N=torch.tensor(recorded),
        advantages_N=torch.tensor(advantages),
        credits_N=torch.tensor(advantages),
        weights_N=torch.full((len(new),), 1 / len(new)),
        sequence_N=torch.tensor(sequence),
        **more,
    )
    return new_N, tokens


@settings(max_examples=30)
@given(sequences, st.sampled_from(LEVELS), st.sampled_from(MODES), bands, st.sampled_from([None, 0.2]))
def test_a_corrected_row_equals_its_definition(
    drawn: Any, level: Any, mode: Any, band: tuple[float, float], delta: float | None
) -> None:
    old_N, recorded_N, advantages_N, sequence_N = flat(drawn)
    new_N = (old_N * 0.9).requires_grad_()
    n = len(old_N)
    tokens = RowTokens(
        new_N=new_N,
        entropy_N=torch.zeros(n),
        rollout_N=recorded_N,
        advantages_N=advantages_N,
        credits_N=advantages_N,
        weights_N=torch.full((n,), 1 / n, dtype=torch.float64),
        sequence_N=sequence_N,
        old_N=old_N,
    )
    tis = TisOptions(tis_clip_low=band[0], tis_clip=band[1], tis_level=level, tis_mode=mode)
    loss, sums = row_loss(tokens, ObjectiveConfig(policy_loss=reinforce, tis=tis, opsm_delta=delta))
    loss.backward()
    dropped_N = (
        torch.zeros(n, dtype=torch.bool)
        if delta is None
        else opsm_dropped(new_N.detach(), recorded_N, advantages_N, sequence_N, delta)
    )
    ratio_N = tis_ratio(old_N, recorded_N, sequence_N, level)
    weights_N = torch.where(dropped_N, 0.0, tis_weights(ratio_N, tis))
    # the weights carry no gradient of their own
    assert new_N.grad is not None
    np.testing.assert_allclose(new_N.grad.numpy(), (-weights_N * advantages_N / n).numpy(), rtol=1e-9)
    assert loss.item() == pytest.approx(float((-weights_N * advantages_N * new_N.detach() / n).sum()), rel=1e-9)
    assert sums["tis"].item() == pytest.approx(float(ratio_N.sum()))
    assert sums["tis_clipfrac"].item() == int((tis_weights(ratio_N, tis) != ratio_N).sum())
    assert sums["kept"].item() == int((weights_N != 0).sum())
    if delta is not None:
        assert sums["opsm_clipfrac"].item() == int(dropped_N.sum())


LOSSES = {row.loss: row for row in ALGORITHMS.values()}


@pytest.mark.parametrize("name", sorted(row.name for row in LOSSES.values()))
@pytest.mark.parametrize("poison", ["advantage nan", "advantage inf", "advantage 1e30", "policy -inf"])
@pytest.mark.parametrize("by", ["tis", "opsm", "function"])
def test_nothing_of_a_rejected_sequence_gets_out(name: str, poison: str, by: str) -> None:
    what, value = poison.split()
    new = [-1.0, -1.5, -90.0, -2.0]
    advantages = [1.0, 1.0, -3.0, -3.0]
    if what == "policy":
        new[2] = float(value)
    else:
        advantages[2] = float(value)
    config = {
        "tis": ObjectiveConfig(tis=TisOptions(tis_level="sequence", tis_mode="mask", tis_clip_low=0.5)),
        "opsm": ObjectiveConfig(opsm_delta=0.1),
        "function": ObjectiveConfig(),
    }[by]
    config = replace(config, policy_loss=ALGORITHMS[name].policy_loss())
    more = {"tis_weights_N": torch.tensor([1.0, 1.0, 0.0, 0.0])} if by == "function" else {}
    new_N, tokens = row(new, [-1.0, -1.5, -1.0, -2.0], advantages, [0, 0, 1, 1], old_N=torch.tensor(new), **more)
    tokens = replace(tokens, credits_N=torch.tensor([1.0, 1.0, -3.0, -3.0]))
    loss, sums = row_loss(tokens, config)
    loss.backward()
    alone_N, kept = row(new[:2], [-1.0, -1.5], [1.0, 1.0], [0, 0], old_N=torch.tensor(new[:2]))
    expected, _ = row_loss(kept, replace(config, tis=None, opsm_delta=None))
    expected.backward()
    assert new_N.grad is not None and alone_N.grad is not None
    assert loss.item() == pytest.approx(expected.item() / 2) and sums["kept"] == 2
    assert new_N.grad.tolist() == pytest.approx([*(alone_N.grad / 2).tolist(), 0.0, 0.0])


@pytest.mark.parametrize("level", LEVELS)
def test_a_token_that_the_policy_rules_out_has_a_finite_weight(level: Any) -> None:
    for old, expected in ((-math.inf, -20.0), (-1e30, -20.0), (0.0, 20.0)):
        ratio_N = tis_ratio(torch.tensor([old]), torch.tensor([-1e30 if old == 0 else -1.0]), torch.tensor([0]), level)
        assert ratio_N.tolist() == pytest.approx([math.exp(expected)], rel=1e-6)
