"""Pool, buffer and policy under a clock that the test moves; groups are coroutines that end when their time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from manual_clock import ManualClock

from silva.data.prompts import Prompt, PromptSource
from silva.data.rows import Dataset, Row
from silva.judge.group_end import GroupResult, GroupSettings
from silva.rollout.failure_budget import FailureBudget
from silva.run.group_buffer import GroupBuffer
from silva.run.group_pool import GroupPool
from silva.run.policy import MAX_FILTERED_BATCHES, StepProgress, SyncPolicy
from silva.run.producer import Producer
from silva.store.ledger import RunLedger
from silva.store.queries import counts, open_run
from silva.types.errors import GroupEnd, RunStopped
from silva.types.rollout import SessionInput

SETTINGS = GroupSettings(mode="train", num_samples=2, min_size=1, num_retries=0)


@dataclass
class Groups:
    """What stands for the group runner. `plan`: by row, seconds with agents, seconds of judgement, and the end."""

    clock: ManualClock
    plan: dict[int, tuple[float, float, GroupEnd | Exception | None]] = field(default_factory=dict)
    begun: list[tuple[int, int]] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)

    async def run(
        self, prompt: Prompt, settings: GroupSettings, *, start_step: int, attempt: int, left: Callable[[], None]
    ) -> GroupResult:
        self.begun.append((start_step, prompt.row))
        self.attempts.append(attempt)
        run_s, judge_s, end = self.plan.get(prompt.row, (1.0, 0.0, None))
        try:
            await self.clock.sleep(run_s)
        except asyncio.CancelledError:
            self.cancelled.append(prompt.row)
            raise
        left()
        await self.clock.sleep(judge_s)
        if isinstance(end, Exception) and not isinstance(end, GroupEnd):
            raise end
        return GroupResult(prompt=prompt, group_id=f"g-{prompt.row}", samples=(), failures=(), end=end)


def prompts(rows: int) -> PromptSource:
    found = tuple(Row(line=n, input=SessionInput(metadata={"n": n})) for n in range(rows))
    return PromptSource(Dataset(path=Path("rows"), rows=found), num_epoch=1, shuffle=False, seed=0)


def rows_of(groups: list[GroupResult]) -> list[int]:
    return [group.prompt.row for group in groups]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


async def test_groups_start_in_one_step_and_are_taken_in_a_later_one(clock: ManualClock, tmp_path: Path) -> None:
    groups = Groups(clock, {0: (5.0, 0.0, None), 1: (1.0, 3.0, None)})
    with RunLedger(tmp_path) as ledger:
        buffer = GroupBuffer(ledger)
        async with GroupPool(source=prompts(3), run_group=groups.run, ledger=ledger, settings=SETTINGS) as pool:
            assert pool.start(2, start_step=0) == 2
            await clock.advance(1)
            assert (pool.num_running, pool.num_resident, pool.take_ended()) == (2, 1, [])
            await asyncio.wait_for(pool.changed(), 1)  # agents left: there is room
            await clock.advance(3)
            for result in pool.take_ended():
                buffer.put(result, step=0)
            assert rows_of(buffer.held) == [1] and buffer.take(buffer.held) == [] and buffer.held == []
            assert pool.start(2, start_step=1) == 1 and not pool.prompts_left
            await clock.advance(1)
            assert groups.begun == [(0, 0), (0, 1), (1, 2)]
            for result in pool.take_ended():
                buffer.put(result, step=1)
            assert rows_of(buffer.held) == [0, 2], "row 0 was started in step 0"
            assert (pool.num_running, pool.num_resident) == (0, 0)


async def test_leaving_the_pool_ends_what_runs_and_a_crash_ends_the_body(clock: ManualClock, tmp_path: Path) -> None:
    with RunLedger(tmp_path) as ledger:
        groups = Groups(clock)
        with pytest.raises(KeyError, match="ours"):
            async with GroupPool(source=prompts(2), run_group=groups.run, ledger=ledger, settings=SETTINGS) as pool:
                pool.start(2, start_step=0)
                await clock.settle()
                raise KeyError("ours")
        assert sorted(groups.cancelled) == [0, 1]
    with RunLedger(tmp_path / "b") as ledger:
        groups = Groups(clock, {0: (1.0, 0.0, RunStopped("spent")), 1: (9.0, 0.0, None)})
        with pytest.raises(ExceptionGroup) as caught:
            async with GroupPool(source=prompts(2), run_group=groups.run, ledger=ledger, settings=SETTINGS) as pool:
                pool.start(2, start_step=0)
                asyncio.get_running_loop().call_later(0.01, asyncio.create_task, clock.advance(1))
                await asyncio.sleep(5)
                raise AssertionError("the crash of a group did not end the body")
        assert caught.group_contains(RunStopped) and groups.cancelled == [1]


async def test_a_group_that_does_not_count_is_settled_at_once(clock: ManualClock, tmp_path: Path) -> None:
    ends = {0: GroupEnd("too_easy", "all pass", state="filtered"), 1: GroupEnd("group_too_small", "1 of 2"), 2: None}
    groups = Groups(clock, {row: (1.0, 0.0, end) for row, end in ends.items()})
    with RunLedger(tmp_path) as ledger:
        buffer = GroupBuffer(ledger)
        async with GroupPool(source=prompts(3), run_group=groups.run, ledger=ledger, settings=SETTINGS) as pool:
            pool.start(3, start_step=4)
            await clock.advance(1)
            for result in pool.take_ended():
                buffer.put(result, step=4)
        assert rows_of(buffer.held) == [2] and buffer.num_ended == {"filtered": 1, "dropped": 1}
        assert [one.state for one in buffer.take(buffer.held)] == ["filtered", "dropped"] and not buffer.num_ended
        assert buffer.take([]) == [], "each is told once"
        ledger.flush()
        with open_run(tmp_path) as conn:
            assert counts(conn)["prompts"] == {
                "dropped": {"group_too_small": 1},
                "filtered": {"too_easy": 1},
                "pending": {"none": 1},
            }


async def test_a_prompt_from_before_a_resume_is_not_issued_again_and_counts_its_attempts(
    clock: ManualClock, tmp_path: Path
) -> None:
    groups = Groups(clock)
    with RunLedger(tmp_path) as ledger:
        issued = {"train:0:0": 2}
        async with GroupPool(
            source=prompts(2), run_group=groups.run, ledger=ledger, settings=SETTINGS, issued=issued
        ) as pool:
            pool.start(2, start_step=5)
            await clock.advance(1)
        assert groups.attempts == [2, 0] and issued == {"train:0:0": 2}
        ledger.flush()
        with open_run(tmp_path) as conn:
            assert counts(conn)["prompts"] == {"pending": {"none": 1}}, "the other one is in the ledger that was there"


async def produced(
    clock: ManualClock, folder: Path, policy: SyncPolicy, groups: Groups, rows: int, steps: int
) -> list[list[int]]:
    found: list[list[int]] = []
    with RunLedger(folder) as ledger:
        producer = Producer(
            source=prompts(rows),
            groups=groups,  # pyright: ignore[reportArgumentType]
            ledger=ledger,
            budget=FailureBudget(99),
            policy=policy,
            group_settings=SETTINGS,
        )
        async with producer:
            for step in range(steps):
                collected = asyncio.create_task(producer.collect(step))
                await clock.until(collected.done)
                found.append(rows_of(collected.result().groups))
    return found


async def test_sync_takes_a_step_when_all_its_groups_ended_in_the_order_of_issue(clock, tmp_path: Path) -> None:
    drop = GroupEnd("group_too_small", "too small")
    plan = {0: (5.0, 0.0, None), 1: (1.0, 0.0, drop), 2: (2.0, 0.0, None)}
    groups = Groups(clock, plan)
    replacing = SyncPolicy(batch_size=2, concurrency=2, replace=True)
    assert await produced(clock, tmp_path / "a", replacing, groups, 5, 3) == [[0, 2], [3, 4], []]
    assert groups.begun == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4)]
    groups = Groups(clock, plan)
    once = SyncPolicy(batch_size=2, concurrency=1, replace=False)
    assert await produced(clock, tmp_path / "b", once, groups, 3, 3) == [[0], [2], []]


async def test_sync_stops_a_run_whose_groups_all_fail_before_it_starts_another(clock, tmp_path: Path) -> None:
    groups = Groups(clock, dict.fromkeys(range(9), (1.0, 0.0, GroupEnd("all_sessions_failed", "none left"))))
    policy = SyncPolicy(batch_size=2, concurrency=2, replace=True)
    with pytest.raises(RunStopped, match="none of the 2 groups of rollout step 0 counts; the last was dropped"):
        await produced(clock, tmp_path, policy, groups, 9, 1)
    assert groups.begun == [(0, 0), (0, 1), (0, 2)], "the first drop was made up for, the second ended the run"


def test_sync_decides_by_counts_alone() -> None:
    policy = SyncPolicy(batch_size=4, concurrency=3, replace=True)
    assert policy.may_start(StepProgress()) == 3
    assert policy.may_start(StepProgress(num_running=3, num_resident=2)) == 1, "one group is judged: its room is free"
    assert policy.may_start(StepProgress(prompts_left=False)) == 0
    assert policy.may_take(StepProgress(num_running=1)) is None
    assert policy.must_stop(StepProgress(num_started=4, num_dropped=4))
    filtered = MAX_FILTERED_BATCHES * 4
    assert not policy.must_stop(StepProgress(num_started=filtered, num_filtered=filtered - 1))
    assert policy.must_stop(StepProgress(num_started=filtered, num_filtered=filtered))
    lenient = SyncPolicy(batch_size=4, concurrency=3, replace=False, stop_if_all_fail=False)
    assert not lenient.must_stop(StepProgress(num_started=4, num_dropped=4))
    assert lenient.may_start(StepProgress(num_started=4)) == 0 and lenient.may_take(StepProgress(num_started=4)) == []
