"""The seam: a driver that runs a whole group as it likes, in this process, and what the runner makes of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway_serve import Serve, serving

from silva.codec import TurnCodec
from silva.data.prompts import Prompt
from silva.judge.group_end import GroupResult, GroupSettings
from silva.judge.rewards import RewardOptions, Rewards
from silva.rollout.failure_budget import FailureBudget
from silva.rollout.group_driver import Again, SessionResult
from silva.rollout.group_runner import GroupRunner
from silva.store.ledger import RunLedger
from silva.store.queries import check_ledgers, counts, open_run
from silva.turns.engine_client import EngineClient
from silva.turns.session import Session
from silva.types.clock import SystemClock
from silva.types.errors import GroupEnd, SessionFailure
from silva.types.generation import SamplingParams
from silva.types.rollout import ExportRecord, Samples, SessionInput
from silva.types.sample_view import GroupView


class GroupLoop:
    """One call for the group: slot 0 is sampled twice, slot 1 fails at first, slot 2 is left out; last slot first."""

    whole_groups = True

    def __init__(self, serve: Serve):
        self._client = EngineClient(serve.engine, SystemClock(), timeout_s=10.0, retry_delays_s=())
        self.calls: list[list[tuple[int, int]]] = []
        self.session_ids: set[str] = set()

    async def run(self, sessions: Sequence[Session], again: Again) -> Mapping[str, SessionResult]:
        self.calls.append([(session.slot, session.try_index) for session in sessions])
        results: dict[str, SessionResult] = {}
        for session in reversed(sessions):
            if (session.slot, session.try_index) == (1, 0):
                results[session.session_id] = SessionFailure("agent_exit", "it broke")
            elif session.slot != 2:
                results[session.session_id] = await self._sample(session)
            if session.slot == 0:
                better = again(session)
                results[better.session_id] = await self._sample(better)
        self.session_ids |= results.keys() | {session.session_id for session in sessions}
        return results

    async def _sample(self, session: Session) -> SessionResult:
        sampling = SamplingParams(max_new_tokens=8)
        turn = await self._client.sample(
            session, request_id=session.session_id, prompt_ids=[5, 6, 7], sampling=sampling
        )
        node = session.forest.append_tokens(None, [5, 6, 7], turn.result)
        return [ExportRecord(name=None, node_id=node.node_id, reward=float(session.try_index))]


class Recorded:
    """A credit stage, here a filter too, that keeps what it saw."""

    def __init__(self) -> None:
        self.groups: list[GroupView] = []
        self.rewards: list[float | None] = []

    async def assign(self, samples: Samples, group: GroupView) -> Samples:
        self.groups.append(group)
        self.rewards = [sample.reward for sample in samples]
        raise GroupEnd("too_easy", "a filter saw reward and credit", state="filtered")


async def run_group(codec: TurnCodec, run_dir: Path, **settings: Any) -> tuple[GroupResult, GroupLoop, Recorded]:
    async with serving(codec, [{"text": "hello"}], open_sessions=False) as serve:
        with RunLedger(run_dir) as ledger:
            loop, credit = GroupLoop(serve), Recorded()
            runner = GroupRunner(
                registry=serve.registry,
                driver=loop,
                leases=serve.leases,
                ledger=ledger,
                budget=FailureBudget(99),
                rewards=Rewards(RewardOptions(), function=None, decode=codec.decode),
                credit=credit,
            )
            given = SessionInput(metadata={"level": 3})
            prompt = Prompt(prompt_id="train:0:9", dataset="train", epoch=0, row=9, position=0, input=given, label="x")
            ledger.issue_prompt(prompt.prompt_id, dataset="train", epoch=0, row=9, position=0)
            rule = GroupSettings(mode="train", num_samples=3, num_retries=1, **{"min_size": 1, **settings})
            result = await runner.run(prompt, rule, start_step=0)
            ledger.end_prompts([prompt.prompt_id], "dropped", reason="test", train_step=0)
            ledger.flush()
            assert serve.leases.num_running == 0
            assert loop.session_ids and all(map(serve.registry.has_ended, loop.session_ids))
    return result, loop, credit


async def test_a_driver_of_whole_groups_reorders_leaves_out_and_samples_again(codec: TurnCodec, tmp_path: Path) -> None:
    result, loop, credit = await run_group(codec, tmp_path)
    assert loop.calls == [[(0, 0), (1, 0), (2, 0)], [(1, 1)]], "only the slot that failed is run again"
    # of slot 0 the second try counts, of slot 1 the retry
    assert [sample.reward for sample in result.samples] == credit.rewards == [1.0, 1.0]
    assert [failure.reason for failure in result.failures] == ["left_out_by_loop"]
    with open_run(tmp_path) as conn:
        check_ledgers(conn)
        assert counts(conn)["sessions"] == {
            "exported": {"none": 2},
            "failed": {"agent_exit": 1, "left_out_by_loop": 2},
        }


async def test_a_credit_stage_sees_rewards_and_the_row_before_the_group_counts(
    codec: TurnCodec, tmp_path: Path
) -> None:
    result, _, credit = await run_group(codec, tmp_path / "a")
    (group,) = credit.groups
    assert (group.row_metadata, group.label, group.slots) == ({"level": 3}, "x", [0, 1])
    assert group.failed_slots == {2: "left_out_by_loop"}
    assert result.end is not None and (result.end.state, result.end.reason) == ("filtered", "too_easy")
    small, _, unasked = await run_group(codec, tmp_path / "b", min_size=3)
    assert small.end is not None and small.end.reason == "group_too_small"
    assert not unasked.groups, "too few are left: credit is not asked for"
