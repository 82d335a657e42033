"""Field cases of contexts and their credit: forests through the real gateway, credits through the stages of a group."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
from contexts import GROUP, context, forked
from gateway_serve import Json, Serve, serving

from silva.codec import TurnCodec
from silva.credit.assign import assign_group_credit
from silva.credit.grpo import standardised
from silva.credit.maxrl import relative_to_mean
from silva.credit.rloo import leave_one_out
from silva.credit.shared import spread_credits
from silva.credit.spread import CreditFunction, centred
from silva.forest.lineage import build_samples
from silva.judge.custom_advantage import CustomAdvantage
from silva.train.packing import pack_batch
from silva.types import SharedPrefix
from silva.types.errors import GroupEnd, SilvaError
from silva.types.rollout import ExportRecord, TrainingSample

HI: list[Json] = [{"role": "user", "content": "hi"}]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


async def two_branches(serve: Serve) -> tuple[int, int, int]:
    """root -> R1 -> (user a -> R2a) and (user b -> R2b); the nodes of the three responses."""
    first = await serve.message("s", HI)
    for text in ("a", "b"):
        await serve.message("s", [*HI, first, user(text)])
    one, left, right = serve.responses("s")
    return one.node_id, left.node_id, right.node_id


def exported(serve: Serve, nodes: dict[str, int], shared_prefix: SharedPrefix = "once") -> list[TrainingSample]:
    """The samples of explicit records with these names."""
    records = [ExportRecord(name=name, node_id=node_id, reward=None) for name, node_id in nodes.items()]
    forest = serve.forest("s")
    return list(build_samples(forest, records, session_id="s", group_id="g", shared_prefix=shared_prefix))


def trained_in(samples: list[TrainingSample], node_id: int) -> list[int]:
    """Trained tokens of one response in each sample that holds it."""
    return [
        sum(sample.loss_mask[span.start : span.start + span.length])
        for sample in samples
        for span in sample.responses
        if span.node_id == node_id
    ]


@pytest.mark.parametrize("names", ["left first", "right first"])
async def test_tree_03_a_turn_that_two_exported_branches_share_is_trained_once(codec: TurnCodec, names: str) -> None:
    async with serving(codec, [{"text": "hello world"}]) as serve:
        first, left, right = await two_branches(serve)
        size = len(serve.responses("s")[0].sampled)
        nodes = {"left": left, "right": right} if names == "left first" else {"right": right, "left": left}
        samples = exported(serve, nodes)
        assert trained_in(samples, first) == [size, 0]
        # whole trees: the inner state is a context of its own, and the leaf trains what is left of it
        inner = exported(serve, {"inner": first, "left": left, "again": first})
        assert trained_in(inner, first) == [size, 0, 0] and inner[2].num_trainable == 0
        each = exported(serve, nodes, "each")
        assert trained_in(each, first) == [size, size]

        value = {"left": 3.0, "right": 1.0}
        done = spread_credits(samples, [value[str(s.name)] for s in samples])
        assert {s.name: (s.credit, s.response_credits) for s in done} == {
            "left": (3.0, (2.0, 3.0)),
            "right": (1.0, (2.0, 1.0)),
        }
        own = spread_credits(each, [value[str(s.name)] for s in each], shared_prefix="each")
        assert [(s.credit, s.response_credits) for s in own] == [(value[str(s.name)], None) for s in own]
        # in both its tokens weigh, and the session's mean is over all of them
        weights = [w for row in pack_batch(own).rows for w in row.weights_N]
        assert weights == [1 / sum(s.num_trainable for s in own)] * len(weights) and sum(weights) == pytest.approx(1)


async def test_tree_03_a_context_without_trainable_tokens_keeps_its_credit_and_yields_no_sample(
    codec: TurnCodec,
) -> None:
    async with serving(codec, [{"text": "hello world"}]) as serve:
        first, left, _ = await two_branches(serve)
        samples = exported(serve, {"left": left, "inner": first})
        done = spread_credits(samples, [1.0, -0.5])
        assert [(s.name, s.credit, s.num_trainable > 0) for s in done] == [("left", 1.0, True), ("inner", -0.5, False)]
        batch = pack_batch(done, micro_batch_size=8)
        (row,) = batch.rows
        assert (batch.num_samples, batch.num_sessions, batch.num_empty_sessions) == (1, 1, 0)
        sizes = [span.length for span in done[0].responses]
        assert row.advantages_N.tolist() == [0.25] * sizes[0] + [1.0] * sizes[1]


@pytest.mark.parametrize(
    ("credit_of", "distance"),
    [(centred, 0.5), (standardised, 0.5 / (0.5**0.5 + 1e-6)), (leave_one_out, 1.0), (relative_to_mean, 1.0)],
)
async def test_tree_05_a_session_with_many_contexts_weighs_as_one(credit_of: CreditFunction, distance: float) -> None:
    many = [context("g-a", name, [(2, 1)], reward=1.0) for name in "xyz"]
    one = context("g-b", None, [(2, 1)], reward=0.0)
    for samples in ([*many, one], [one, *many]):
        credited, stats = assign_group_credit(samples, credit_of=credit_of, shared_prefix="each")
        assert {s.session_id: s.credit for s in credited} == pytest.approx({"g-a": distance, "g-b": -distance})
        assert len({s.credit for s in credited}) == 2
        assert (stats.num_groups, stats.num_sessions) == (1, 2)


async def test_tree_05_custom_credit_is_used_untouched() -> None:
    async def untouched(metadata_by_slot: list[Any]) -> object:
        return [{name: 10.0 * slot + 1 for name in item} for slot, item in enumerate(metadata_by_slot)]

    async def none(_: object) -> None:
        return None

    samples = (*forked("g-b", "mn"), context("g-a", None, [(2, 1)]))
    given = await CustomAdvantage(untouched, failed=SilvaError).assign(samples, GROUP)
    assert [(s.session_id, s.credit) for s in given] == [("g-b", 1.0), ("g-b", 1.0), ("g-a", 11.0)]
    with pytest.raises(GroupEnd) as caught:
        await CustomAdvantage(none, failed=SilvaError).assign(samples, GROUP)
    assert (caught.value.state, caught.value.reason) == ("filtered", "custom_advantage_none")


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(
    ("credit_of", "scale_g0", "scale_g2"),
    [
        (centred, 1.0, 1.0),
        (standardised, 1 / ((8.75 / 3) ** 0.5 + 1e-6), 1 / ((4.75 / 3) ** 0.5 + 1e-6)),
        (leave_one_out, 4 / 3, 4 / 3),
        (relative_to_mean, 1 / 5.75, 1 / 7.25),
    ],
)
def test_tree_06_groups_of_unequal_size_are_centred_on_their_own_mean(
    credit_of: CreditFunction, scale_g0: float, scale_g2: float, seed: int | None
) -> None:
    groups: dict[str, list[float | None]] = {
        "g0": [4.0, 5.0, 6.0, 8.0],
        "g1": [5.0, 5.0, None, 5.0],  # one of them failed
        "g2": [6.0, 7.0, 7.0, 9.0],
    }
    samples = [
        context(f"{group}-{slot}", None, [(2, 1)], reward=reward)
        for group, rewards in groups.items()
        for slot, reward in enumerate(rewards)
    ]
    if seed is not None:
        random.Random(seed).shuffle(samples)
    credited, _ = assign_group_credit(samples, credit_of=credit_of)
    credit = {s.session_id: s.credit for s in credited}
    assert [credit.pop(f"g1-{slot}") for slot in (0, 1, 3)] == [0.0] * 3
    distances = {"g0": (-1.75, -0.75, 0.25, 2.25), "g2": (-1.25, -0.25, -0.25, 1.75)}
    scale = {"g0": scale_g0, "g2": scale_g2}
    assert credit == pytest.approx(
        {f"{g}-{slot}": d * scale[g] for g, group in distances.items() for slot, d in enumerate(group)}, rel=1e-12
    )


async def test_tree_11_the_cap_on_a_turn_does_not_cut_the_whole_response(codec: TurnCodec) -> None:
    six = [codec.encode_sampled(letter)[0] for letter in "hello "]
    line = {"ids": six, "append_eos": False, "finish_reason": "length"}
    async with serving(codec, [line], rollout_max_response_len=8) as serve:
        history = list(HI)
        for _ in range(3):
            history += [await serve.message("s", history), user("go")]
        sample = serve.sample("s")
        calls = serve.calls("s")
        assert [call["sampling_params"]["max_new_tokens"] for call in calls] == [8, 8, 8]
        between = [len(b["input_ids"]) - len(a["input_ids"]) - 6 for a, b in itertools.pairwise(calls)]
        assert len(sample.token_ids) - sample.prompt_len == 18 + sum(between) and sum(between) > 8
        assert (sum(sample.loss_mask), [span.length for span in sample.responses]) == (18, [6, 6, 6])
        (row,) = pack_batch(list(spread_credits([sample], [1.0])), micro_batch_size=1).rows
        assert (row.num_tokens, row.num_trainable) == (len(sample.token_ids), 18)


NAMED = ({"main": 1.0}, {"main": 0.0})
BAD_RETURNS: list[tuple[object, str]] = [
    (
        [{"main": math.nan}, {"main": 0.0}],
        r"session g-0 \(item 0\), context 'main' is nan \(float\): it must be finite",
    ),
    ([{"main": 1.0}, {"main": math.inf}], r"session g-1 \(item 1\), context 'main' is inf"),
    (
        [{"main": "1.0"}, {"main": 0.0}],
        r"session g-0 \(item 0\), context 'main' is '1\.0' \(str\): it must be a number",
    ),
    ([{"main": None}, {"main": 0.0}], r"session g-0 \(item 0\), context 'main' is None"),
    ([{"main": 1.0}, {}], r"no credit for session g-1 \(item 1\), context 'main'"),
    ([{"main": 1.0}, {"main": 0.0, "helper": 1.0}], r"session g-1 \(item 1\), context 'helper', which"),
    ([{"main": 1.0}], "a list of 1 for 2 sessions"),
    ([{"main": 1.0}, {"main": 0.0}, {"main": 0.0}], "a list of 3 for 2 sessions"),
]


@pytest.mark.parametrize(("returned", "told"), BAD_RETURNS)
async def test_loss_05_a_bad_custom_advantage_never_reaches_the_trainer(returned: object, told: str) -> None:
    async def advantage(_: object) -> object:
        return returned

    samples = tuple(context(f"g-{i}", "main", [(2, 2)]) for i in range(2))
    with pytest.raises(GroupEnd, match=told) as caught:
        await CustomAdvantage(advantage, failed=SilvaError).assign(samples, GROUP)
    assert (caught.value.reason, caught.value.state) == ("custom_advantage_invalid", "dropped")


@pytest.mark.parametrize("value", [True, np.bool_(True), np.float32(1), np.int8(1), 1])
async def test_loss_05_bools_and_numpy_numbers_of_a_custom_advantage_count_by_rule(value: object) -> None:
    async def advantage(_: object) -> object:
        return [{"main": value}, {"main": [value]}]

    samples = tuple(context(f"g-{i}", "main", [(2, 2)]) for i in range(2))
    credited = await CustomAdvantage(advantage, failed=SilvaError).assign(samples, GROUP)
    assert [(s.credit, s.response_credits) for s in credited] == [(1.0, None)] * 2


def test_loss_05_rewards_that_contexts_of_a_session_disagree_on_cost_that_session_alone() -> None:
    samples = [*forked("g-0", "ab"), context("g-1", None, [(2, 1)], reward=1.0)]
    samples += [*forked("g-2", "ab", reward=0.5), context("g-3", None, [(2, 1)], reward=0.0)]
    samples[1] = context("g-0", "b", [(2, 3), (5, 2)], reward=None)
    clash = [context("g-4", name, [(2, 1)], reward=reward) for name, reward in (("a", 0.0), ("b", 1.0))]
    credited, stats = assign_group_credit([*samples, *clash])
    assert set(stats.rejected) == {"g-0", "g-4"} and "None" in str(stats.rejected["g-0"])
    assert "context a has the reward 0.0 and session g-4, context b 1.0" in str(stats.rejected["g-4"])
    assert [s.credit for s in credited] == pytest.approx(
        [standardised([1.0, 0.5, 0.0])[i] for i in (0, 1, 1, 2)], abs=1e-12
    )
