from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spans import responses_of

from silva.credit.assign import assign_group_credit
from silva.types.generation import VersionSpan
from silva.types.rollout import TrainingSample


def make_sample(session_id: str, group_id: str, reward: float | None, name: str | None = None) -> TrainingSample:
    return TrainingSample(
        session_id=session_id,
        group_id=group_id,
        name=name,
        node_id=1,
        prompt_len=1,
        token_ids=[5, 6],
        loss_mask=[0, 1],
        logprobs=[0.0, -0.5],
        kept_mass=[1.0, 1.0],
        version_spans=(VersionSpan(start=0, length=1, version=-1), VersionSpan(start=1, length=1, version=3)),
        responses=responses_of([0, 1]),
        reward=reward,
    )


def credits_of(samples: list[TrainingSample]) -> dict[str, float | None]:
    return {sample.session_id: sample.credit for sample in assign_group_credit(samples)[0]}


@settings(max_examples=40)
@given(st.data())
def test_credit_depends_on_group_ids_and_never_on_positions(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    samples: list[TrainingSample] = []
    for g, size in enumerate(sizes):
        for s in range(size):
            reward = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
            for name in data.draw(st.sampled_from([[None], ["a", "b"], ["a", "b", "c"]])):
                samples.append(make_sample(f"g{g}-s{s}", f"g{g}", reward, name))
    shuffled = data.draw(st.permutations(samples))
    credited, stats = assign_group_credit(shuffled)
    assert [(s.session_id, s.name) for s in credited] == [(s.session_id, s.name) for s in shuffled]
    by_session: dict[str, set[float | None]] = {}
    for sample in credited:
        by_session.setdefault(sample.session_id, set()).add(sample.credit)
    assert all(len(values) == 1 for values in by_session.values())
    reference = credits_of(samples)
    assert credits_of(shuffled) == pytest.approx(reference)
    # a session counts once, however many samples it exported
    one_each = {s.session_id: s for s in samples}
    assert credits_of(list(one_each.values())) == pytest.approx(reference)
    assert stats.num_groups == len(sizes) and stats.num_sessions == sum(sizes) and not stats.rejected


def test_groups_without_spread_are_counted_by_their_reward() -> None:
    samples = [make_sample(f"a{i}", "a", 0.9) for i in range(4)]
    samples += [make_sample(f"b{i}", "b", 0.9) for i in range(3)]
    samples += [make_sample("c0", "c", 1.0)]
    samples += [make_sample("d0", "d", 0.0), make_sample("d1", "d", 1.0)]
    credited, stats = assign_group_credit(samples)
    assert [s.credit for s in credited[:8]] == [0.0] * 8
    assert stats.zero_std == {0.9: 2, 1.0: 1}
    assert stats.metrics() == {"rollout/zero_std/count_0.9": 2.0, "rollout/zero_std/count_1": 1.0}
    assert stats.num_groups == 4 and stats.num_sessions == 10


def test_a_session_that_disagrees_with_itself_is_left_out_and_named() -> None:
    samples = [make_sample("s0", "g", 1.0, "a"), make_sample("s0", "g", 0.0, "b")]
    samples += [make_sample("s1", "g", 1.0), make_sample("s2", "g", 0.0)]
    credited, stats = assign_group_credit(samples)
    assert [s.session_id for s in credited] == ["s1", "s2"]
    assert "s0" in str(stats.rejected["s0"]) and stats.rejected["s0"].reason == "reward_invalid"
    assert [s.credit for s in credited] == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)


def test_input_samples_are_not_changed() -> None:
    samples = [make_sample("s0", "g", 1.0), make_sample("s1", "g", 0.0)]
    copies = [replace(sample) for sample in samples]
    assign_group_credit(samples)
    assert samples == copies and all(sample.credit is None for sample in samples)


def test_no_samples_give_no_groups() -> None:
    credited, stats = assign_group_credit([])
    assert credited == [] and stats.num_groups == 0 and stats.metrics() == {}
