"""Field cases about numbers: what counts how often, and in which denominator."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import Talk, producing

from silva.codec import TurnCodec
from silva.run.metrics import rollout_metrics
from silva.store.queries import accounting, open_run
from silva.types.errors import SessionFailure
from silva.types.rollout import ExportRecord


async def right_wrong_failed_or_silent(talk: Talk) -> list[ExportRecord]:
    number = talk.slot + talk.row
    if number == 3:
        raise SessionFailure("no_response", "it asked nothing")
    await talk.ask("q")
    if number == 2:
        raise SessionFailure("agent_exit", "it broke")
    return [ExportRecord(name=None, node_id=talk.last(), reward=[1.0, 0.0][number], helpers={"speed": 2.0})]


@pytest.mark.parametrize(("rows", "num_samples"), [(1, 4), (4, 1)])
async def test_met_01_denominators_hold_what_failed(
    codec: TurnCodec, tmp_path: Path, rows: int, num_samples: int
) -> None:
    agent = right_wrong_failed_or_silent
    async with producing(codec, tmp_path, agent, rows=rows, num_samples=num_samples) as producer:
        step = await producer.collect(0)
    found = rollout_metrics(step, passrate=True)
    assert (found["rollout/raw_reward"], found["rollout/num_rewarded"]) == (0.5, 2)
    assert (found["rollout/raw_reward_all"], found["rollout/failed_ratio"]) == (0.25, 0.5)
    assert found["rollout/passrate/pass@1"] == 0.25
    assert (found["rollout/passrate/num_groups@1"], found["rollout/passrate/num_failed"]) == (rows, 2)
    if rows == 1:
        assert (found["rollout/passrate/pass@2"], found["rollout/passrate/pass@4"]) == (0.5, 1)
    with open_run(tmp_path) as conn:
        account = accounting(conn, 0)
    started = account["exported"] + account["failed"] + account["cancelled"]
    assert started == found["rollout/num_slots"] == found["rollout/num_sessions"] + found["rollout/num_failed"] == 4
    groups = ("num_groups", "num_dropped_groups", "num_filtered_groups")
    assert sum(found[f"rollout/{name}"] for name in groups) == account["prompts"] == rows
    assert found["rollout/num_dropped_groups"] == account["dropped"] == (0 if rows == 1 else 2)


async def three_contexts_or_one(talk: Talk) -> list[ExportRecord]:
    if talk.slot == 1:
        await talk.ask("q")
        return [ExportRecord(name=None, node_id=talk.last(), reward=0.0, metadata={"size": 1})]
    records: list[ExportRecord] = []
    shared = await talk.ask("q")
    for name, reward in (("side", None), ("main", 1.0), ("other", None)):
        await talk.ask(name, after=shared)
        helpers = {} if reward is None else {"speed": 4.0, "num_turn": 9.0}
        records.append(
            ExportRecord(
                name=name,
                node_id=talk.last(),
                reward=reward,
                helpers=helpers,
                metadata={"size": len(records) + 2, "train/loss": 1, "staleness": 7},
            )
        )
    return records


async def test_met_03_a_session_counts_once_whatever_it_exports(
    codec: TurnCodec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with producing(codec, tmp_path, three_contexts_or_one, rows=1, num_samples=2) as producer:
        step = await producer.collect(0)
    found = rollout_metrics(step, passrate=True)
    assert (found["rollout/passrate/pass@1"], found["rollout/passrate/pass@2"]) == (0.5, 1)
    assert (found["rollout/raw_reward"], found["rollout/raw_reward_all"]) == (0.5, 0.5)
    assert (found["rollout/num_sessions"], found["rollout/num_contexts"], found["rollout/num_slots"]) == (2, 4, 2)
    assert (found["rollout/speed/mean"], found["size/mean"], found["size/max"]) == (4, 2, 3)
    # The first question and its answer are shared by the three contexts.
    assert (found["rollout/num_turn/max"], found["rollout/num_turn/min"]) == (4, 1)
    samples = step.groups[0].samples
    per_turn = samples[-1].responses[0].length
    assert [len(sample.responses) for sample in samples] == [2, 2, 2, 1]
    assert found["rollout/response_len/max"] == 4 * per_turn == 4 * found["rollout/response_len/min"]
    assert sum(span.length for sample in samples[:3] for span in sample.responses) == 6 * per_turn
    # Names of our own are ours.
    assert not [name for name in found if "loss" in name or "staleness" in name]
    for name in ("num_turn", "train/loss", "staleness"):
        assert sum(f"'{name}' is left out" in message for message in caplog.messages) == 1


async def test_sessions_whose_success_is_not_told_are_counted_beside_the_pass_rate(
    codec: TurnCodec, tmp_path: Path
) -> None:
    async def agent(talk: Talk) -> list[ExportRecord]:
        rewards = [(1.0, 1.0), (None, None), (0.5, None), (None, 1.0)][talk.slot]
        records: list[ExportRecord] = []
        for name, reward in zip("ab", rewards, strict=True):
            await talk.ask(name)
            records.append(ExportRecord(name=name, node_id=talk.last(), reward=reward))
        return records

    async with producing(codec, tmp_path, agent, rows=1, num_samples=4) as producer:
        found = rollout_metrics(await producer.collect(0), passrate=True)
    assert (found["rollout/passrate/num_ambiguous"], found["rollout/passrate/num_unrewarded"]) == (1, 1)
    assert (found["rollout/passrate/pass@1"], found["rollout/passrate/pass@2"]) == (0.5, 1)
    assert found["rollout/passrate/num_groups@4"] == 0 and "rollout/passrate/pass@4" not in found
    assert (found["rollout/raw_reward"], found["rollout/num_rewarded"]) == (pytest.approx(2.5 / 3), 3)
