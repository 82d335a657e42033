"""Credit of contexts that share turns, and of sessions that are cut into contexts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from contexts import context, forked
from hypothesis import given, settings
from hypothesis import strategies as st
from train_tiny import write_least_model

from silva.credit.assign import assign_group_credit, token_shares
from silva.credit.shared import num_shared_responses, spread_credits, train_shared
from silva.train.policy import PolicyConfig, PolicyTrainer
from silva.types.rollout import TrainingSample

numbers = st.floats(-1e6, 1e6)


@settings(max_examples=40)
@given(st.data())
def test_a_shared_turn_has_the_mean_of_its_contexts_whatever_their_order(data: st.DataObject) -> None:
    samples = forked("g-s", "abcd"[: data.draw(st.integers(1, 4))]) + forked("g-t", "ab")
    credits = {(s.session_id, s.name): data.draw(numbers) for s in samples}
    order = data.draw(st.permutations(samples))
    done = spread_credits(order, [credits[s.session_id, s.name] for s in order])
    for sample, before in zip(done, order, strict=True):
        own = credits[sample.session_id, sample.name]
        given = [credit for (session, _), credit in credits.items() if session == sample.session_id]
        first, second = sample.response_credits or (own, own)
        assert (sample.credit, second) == (own, own)
        assert first == pytest.approx(math.fsum(given) / len(given), rel=1e-12, abs=1e-300)
        assert replace(sample, credit=None, response_credits=None) == before
    same_turn = {(s.session_id, (s.response_credits or (s.credit,))[0]) for s in done}
    assert len(same_turn) == 2, "one value a session, bit for bit"
    each = spread_credits(order, [credits[s.session_id, s.name] for s in order], shared_prefix="each")
    assert all(s.response_credits is None and s.credit == credits[s.session_id, s.name] for s in each)


@settings(max_examples=25)
@given(st.permutations(["plus", "minus", "none"]), numbers)
def test_plus_and_minus_over_a_shared_prefix_give_exactly_nothing_there(names: list[str], size: float) -> None:
    samples = [replace(s, name=name) for s, name in zip(forked("g-s", "abc"), names, strict=True)]
    value = {"plus": size, "minus": -size, "none": 0.0}
    done = spread_credits(samples, [value[str(s.name)] for s in samples])
    assert [(s.response_credits or (0.0,))[0] for s in done] == [0.0] * 3
    assert num_shared_responses(done) == 1


@settings(max_examples=25)
@given(st.permutations("abc"), st.permutations("abc"))
def test_shared_turns_are_trained_by_the_first_or_by_each_however_they_were_recorded(
    recorded: list[str], wanted: list[str]
) -> None:
    """The first of those that are there trains a shared turn: log-probs come from the one that did when recorded."""
    once = [replace(s, name=name) for s, name in zip(forked("g-s", "abc"), recorded, strict=True)]
    own = {s.name: s.node_id for s in once}
    again = train_shared(sorted(once, key=lambda s: wanted.index(str(s.name))), "once")
    for sample, trained in zip(again, [{2}, set[int](), set[int]()], strict=True):
        node = own[sample.name]
        like = context("g-s", sample.name, [(2, 3), (node, node - 3)], trained={*trained, node})
        assert sample == like
    each = train_shared(again, "each")
    assert [s.num_trainable for s in each] == [3 + own[s.name] - 3 for s in each]
    assert train_shared(each, "each") == each and train_shared(each, "once") == again
    untrained = [replace(s, loss_mask=[0] * 6 + s.loss_mask[6:], logprobs=[0.0] * 6 + s.logprobs[6:]) for s in once]
    assert list(train_shared(untrained, "each")) == untrained


def test_one_credit_for_each_turn() -> None:
    samples = forked("g-s", "ab")
    done = spread_credits(samples, [(1.0, 5.0), 2.0])
    assert [s.response_credits for s in done] == [(1.5, 5.0), (1.5, 2.0)]
    assert [s.credit for s in done] == [(3 * 1.0 + 1 * 5.0) / 4, 2.0]
    (alone,) = spread_credits(samples[:1], [(0.1, 0.1)])
    assert (alone.credit, alone.response_credits) == (0.1, None)


@settings(max_examples=50)
@given(st.data(), st.sampled_from(["shared", "split"]))
def test_group_statistics_know_sessions_only(data: st.DataObject, share: Any) -> None:
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=2, max_size=5))
    samples: list[TrainingSample] = []
    for number, reward in enumerate(rewards):
        names = "abc"[: data.draw(st.integers(1, 3))]
        bearer = data.draw(st.sampled_from(names))
        for s in forked(f"g-{number}", names):
            samples.append(replace(s, reward=reward if s.name == bearer or data.draw(st.booleans()) else None))
    failed = forked("g-failed", "ab")
    order = data.draw(st.permutations([*samples, *failed]))
    credited, stats = assign_group_credit(order, share=share)
    assert set(stats.rejected) == {"g-failed"} and stats.num_sessions == len(rewards)
    plain, _ = assign_group_credit([context(f"g-{i}", None, [(2, 1)], reward=r) for i, r in enumerate(rewards)])
    assert [(s.session_id, s.name) for s in credited] == [
        (s.session_id, s.name) for s in order if s.session_id != "g-failed"
    ]
    for one in plain:
        assert one.credit is not None
        mine = [s.credit or 0.0 for s in credited if s.session_id == one.session_id]
        if share == "shared":
            assert all(credit == pytest.approx(one.credit, abs=1e-12) for credit in mine)
            assert all(s.response_credits is None for s in credited)
        else:
            assert math.fsum(mine) == pytest.approx(one.credit, abs=1e-9)


def test_the_share_of_a_context_is_that_of_its_tokens_with_shared_ones_in_parts() -> None:
    first, second = forked("g-s", "ab")  # 3 shared tokens; 1 and 2 of their own
    assert token_shares([first, second]) == pytest.approx([2.5 / 6, 3.5 / 6])
    assert token_shares([second, first]) == pytest.approx([3.5 / 6, 2.5 / 6])


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> PolicyTrainer:
    folder = write_least_model(tmp_path_factory.mktemp("model"))
    return PolicyTrainer(folder, PolicyConfig(lr=0.0, clip_grad=0.0, device="cpu", max_tokens_per_gpu=64))


def loss_and_gradient(trainer: PolicyTrainer, samples: list[TrainingSample]) -> tuple[float, torch.Tensor]:
    seen: list[torch.Tensor] = []

    def keep(*_: Any) -> None:
        parameters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
        seen.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).clone())

    handle = trainer.optimizer.register_step_pre_hook(keep)
    result = trainer.train_step(samples)
    handle.remove()
    return result.metrics["train/loss"], seen[0]


@settings(max_examples=12)
@given(st.data())
def test_cutting_a_session_into_contexts_changes_neither_loss_nor_gradient(
    trainer: PolicyTrainer, data: st.DataObject
) -> None:
    """Each turn is trained in one context, wherever that is, and every context gets the session's credit."""
    turns = [
        (2 * at + 2, length) for at, length in enumerate(data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=6)))
    ]
    whole = [context("g-0", None, turns, reward=1.0), context("g-1", None, [(2, 3)], reward=0.0)]
    owner = [data.draw(st.integers(0, 2)) for _ in turns]
    parts: list[TrainingSample] = []
    for part in sorted(set(owner)):
        mine = {node for (node, _), whose in zip(turns, owner, strict=True) if whose == part}
        last = max(at for at, whose in enumerate(owner) if whose == part)
        parts.append(context("g-0", f"part-{part}", turns[: last + 1], reward=1.0, trained=mine))
    cut = data.draw(st.permutations([*parts, whole[1]]))
    loss, gradient = loss_and_gradient(trainer, assign_group_credit(whole)[0])
    loss_cut, gradient_cut = loss_and_gradient(trainer, assign_group_credit(cut)[0])
    assert loss_cut == pytest.approx(loss, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradient_cut, gradient, rtol=1e-4, atol=1e-6)


def test_a_shared_prefix_with_credits_that_cancel_out_has_no_gradient(trainer: PolicyTrainer) -> None:
    samples = list(spread_credits(forked("g-s", "ab"), [1.0, -1.0]))
    _, gradient = loss_and_gradient(trainer, samples)
    masked = [replace(samples[0], loss_mask=[0] * 6 + samples[0].loss_mask[6:]), samples[1]]
    _, without = loss_and_gradient(trainer, masked)
    assert gradient.abs().sum() > 0
    # the same direction; only the session's number of tokens, which weighs each, is another one: 6, and 3 without
    torch.testing.assert_close(gradient * 2, without, rtol=1e-4, atol=1e-6)
