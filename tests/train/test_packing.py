from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spans import responses_of
from train_tiny import make_sample, random_samples

from silva.train.packing import PackedRow, leave_out_too_long, pack_batch, split_sessions
from silva.types.errors import ConfigError, SilvaError


@settings(max_examples=40)
@given(st.integers(0, 50), st.integers(1, 7), st.integers(1, 6), st.none() | st.integers(13, 60))
def test_each_trainable_token_is_packed_exactly_once(
    seed: int, num_sessions: int, micro_batch_size: int, max_tokens: int | None
) -> None:
    samples = random_samples(seed, num_sessions)
    batch = pack_batch(samples, micro_batch_size=micro_batch_size, max_tokens=max_tokens)
    if max_tokens is None:
        assert [len(row.document_lengths) for row in batch.rows[:-1]] == [micro_batch_size] * (len(batch.rows) - 1)
    else:
        assert all(row.num_tokens <= max_tokens for row in batch.rows)
    seen: list[tuple[int, int]] = []
    for row in batch.rows:
        starts = dict(zip(dict.fromkeys(row.owners_N), np.cumsum([0, *row.document_lengths]), strict=False))
        for n in range(row.num_trainable):
            owner, place = int(row.owners_N[n]), int(row.places_N[n])
            sample = samples[owner]
            seen.append((owner, place))
            assert row.targets_N[n] == sample.token_ids[place]
            assert row.predict_N[n] == starts[owner] + place - 1
            assert row.rollout_logprobs_N[n] == sample.logprobs[place]
            assert row.advantages_N[n] == sample.credit
    expected = [(i, t) for i, s in enumerate(samples) for t, bit in enumerate(s.loss_mask) if bit]
    assert sorted(seen) == expected and len(seen) == batch.num_trainable
    assert batch.num_sessions == num_sessions and batch.num_samples == len(samples)


@settings(max_examples=40)
@given(st.integers(0, 50), st.integers(1, 7), st.integers(1, 6), st.none() | st.integers(13, 60))
def test_weights_follow_the_reduction_and_not_the_rows(
    seed: int, num_sessions: int, micro_batch_size: int, max_tokens: int | None
) -> None:
    samples = random_samples(seed, num_sessions)
    tokens: dict[str, int] = {}
    for sample in samples:
        tokens[sample.session_id] = tokens.get(sample.session_id, 0) + sample.num_trainable
    expected = {
        "session_mean": lambda s: 1 / tokens[s] / len(tokens),
        "per_token": lambda s: 1 / sum(tokens.values()),
        "seq_mean_token_sum_norm": lambda s: 1 / 32 / len(tokens),
    }
    for reduction, weight in expected.items():
        batch = pack_batch(
            samples,
            micro_batch_size=micro_batch_size,
            max_tokens=max_tokens,
            reduction=reduction,  # type: ignore[arg-type]
            max_response_len=32,
        )
        for row in batch.rows:
            wanted = [weight(samples[owner].session_id) for owner in row.owners_N]
            np.testing.assert_allclose(row.weights_N, wanted, rtol=1e-12)


def test_masks_that_take_tokens_out_change_counts_but_keep_their_session_in_the_mean() -> None:
    samples = [make_sample("a", [1, 2, 3], [0, 1, 1]), make_sample("b", [1, 2, 3], [0, 1, 1])]
    batch = pack_batch(samples, micro_batch_size=8, loss_masks=[[0, 0, 0], [0, 0, 1]])
    assert (batch.num_sessions, batch.num_empty_sessions, batch.num_trainable) == (2, 1, 1)
    assert [row.document_lengths for row in batch.rows] == [(3,)]
    assert batch.rows[0].weights_N.tolist() == [0.5]
    assert batch.rows[0].owners_N.tolist() == [1]


def test_gather_and_scatter_are_inverse() -> None:
    samples = random_samples(4, 6)
    values = [np.where(s.loss_mask, np.random.default_rng(i).normal(size=len(s.token_ids)), 0.0) for i, s in
              enumerate(samples)]  # fmt: skip
    out = [np.zeros(len(s.token_ids)) for s in samples]
    for row in pack_batch(samples, micro_batch_size=3).rows:
        row.scatter(row.gather(values), out)
    for mine, theirs in zip(out, values, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@given(st.integers(0, 50), st.integers(1, 9), st.integers(1, 5))
def test_steps_take_whole_sessions_each_once_and_evenly(seed: int, num_sessions: int, num_steps: int) -> None:
    samples = random_samples(seed, num_sessions)
    parts = split_sessions(samples, num_steps)
    assert len(parts) == num_steps
    assert sorted(i for part in parts for i in part) == list(range(len(samples)))
    sessions = [{samples[i].session_id for i in part} for part in parts]
    first = list(dict.fromkeys(sample.session_id for sample in samples))
    assert list(dict.fromkeys(samples[i].session_id for part in parts for i in part)) == first
    assert sum(map(len, sessions)) == num_sessions
    assert max(map(len, sessions)) - min(map(len, sessions)) <= 1


def test_no_sample_gives_no_row() -> None:
    batch = pack_batch([], micro_batch_size=2)
    assert (batch.rows, batch.num_sessions, batch.num_trainable) == ((), 0, 0)
    assert split_sessions([], 2) == [[], []]


def test_rows_that_do_not_line_up_cannot_be_made() -> None:
    row = pack_batch([make_sample("a", [1, 2, 3, 4], [0, 1, 0, 1])], micro_batch_size=1).rows[0]
    for field in fields(PackedRow):
        value = getattr(row, field.name)
        with pytest.raises(ValueError, match="packed row"):
            replace(row, **{field.name: value[:-1]})
    with pytest.raises(ValueError, match="do not follow"):
        replace(row, predict_N=row.predict_N - 1)


def test_samples_that_cannot_be_trained_are_named() -> None:
    good = make_sample("s1", [1, 2, 3], [0, 1, 1])
    with pytest.raises(SilvaError, match=r"s1.*no credit"):
        pack_batch([replace(good, credit=None)], micro_batch_size=1)
    with pytest.raises(SilvaError, match=r"s1.*first token"):
        pack_batch([replace(good, loss_mask=[1, 1, 1], responses=responses_of([1, 1, 1]))], micro_batch_size=1)
    with pytest.raises(SilvaError, match=r"s1.*not finite"):
        pack_batch([replace(good, logprobs=[0.0, math.nan, -1.0])], micro_batch_size=1)
    # where the mask is 0 nothing is read
    assert pack_batch([replace(good, logprobs=[math.nan, -1.0, -1.0])], micro_batch_size=1).num_trainable == 2
    with pytest.raises(ValueError, match=r"s1.*2 entries for 3 tokens"):
        pack_batch([good], micro_batch_size=1, loss_masks=[[0, 1]])


def test_samples_too_long_for_a_row_are_left_out_before_anything_is_counted() -> None:
    short, long = make_sample("a", [1, 2, 3], [0, 1, 1]), make_sample("b", [1] * 9, [0, *[1] * 8], name="long")
    with pytest.raises(SilvaError, match=r"sample b/long has 9 tokens, a row holds 8"):
        pack_batch([short, long], max_tokens=8)
    assert leave_out_too_long([short, long], 9) == ([short, long], [])
    fit, too_long = leave_out_too_long([short, long], 8)
    assert too_long == [long]
    batch = pack_batch(fit, max_tokens=8)
    assert (batch.num_sessions, batch.num_trainable, batch.rows[0].weights_N.tolist()) == (1, 2, [0.5, 0.5])
    # another context of the session stays, and its tokens alone make the session's mean
    other = make_sample("b", [1, 2], [0, 1])
    assert leave_out_too_long([long, short, other], 8) == ([short, other], [long])


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        pack_batch([], max_tokens=0)
    with pytest.raises(ConfigError, match="micro_batch_size is 0"):
        pack_batch([], micro_batch_size=0)
    with pytest.raises(ConfigError, match="'mean' does not exist"):
        pack_batch([], micro_batch_size=1, reduction="mean")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_response_len, which is None"):
        pack_batch([], micro_batch_size=1, reduction="seq_mean_token_sum_norm")
    with pytest.raises(ConfigError, match="is 0"):
        split_sessions([], 0)
