"""What the group runner promises for the bad days: runs that stop, runners that are lost, tries that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from gateway_serve import serving

from silva.codec import TurnCodec
from silva.data.prompts import Prompt
from silva.judge.group_end import GroupResult, GroupSettings
from silva.judge.options import RewardOptions
from silva.judge.rewards import Rewards
from silva.rollout.failure_budget import FailureBudget
from silva.rollout.group_driver import RUNNER_LOST, Again, EachSession, GroupDriver, SessionResult
from silva.rollout.group_runner import GroupRunner
from silva.store.ledger import RunLedger
from silva.store.queries import counts, open_run
from silva.turns.engine_client import EngineClient
from silva.turns.session import Session
from silva.types.clock import SystemClock
from silva.types.errors import RunStopped, SessionFailure
from silva.types.generation import SamplingParams
from silva.types.rollout import ExportRecord, SessionInput

ANY = SessionInput(metadata={"n": 1})
Sample = Callable[[Session], Awaitable[list[ExportRecord]]]


async def run_group(
    codec: TurnCodec, run_dir: Path, make: Callable[[Sample], GroupDriver], *, max_failures: int = 99, **settings: Any
) -> GroupResult:
    """One group whose sessions are run by what `make` makes of a way to sample one turn."""
    async with serving(codec, [{"text": "hello"}], open_sessions=False) as serve:
        client = EngineClient(serve.engine, SystemClock(), timeout_s=10.0, retry_delays_s=())

        async def sample(session: Session) -> list[ExportRecord]:
            turn = await client.sample(
                session, request_id=session.session_id, prompt_ids=[5, 6], sampling=SamplingParams(max_new_tokens=8)
            )
            node = session.forest.append_tokens(None, [5, 6], turn.result)
            return [ExportRecord(name=None, node_id=node.node_id, reward=float(session.try_index))]

        with RunLedger(run_dir) as ledger:
            runner = GroupRunner(
                registry=serve.registry,
                driver=make(sample),
                leases=serve.leases,
                ledger=ledger,
                budget=FailureBudget(max_failures),
                rewards=Rewards(RewardOptions(), function=None, decode=codec.decode),
            )
            prompt = Prompt(prompt_id="train:0:0", dataset="train", epoch=0, row=0, position=0, input=ANY)
            ledger.issue_prompt(prompt.prompt_id, dataset="train", epoch=0, row=0, position=0)
            rule = GroupSettings(mode="train", **{"num_samples": 1, "min_size": 1, "num_retries": 0, **settings})
            return await runner.run(prompt, rule, start_step=0)


def sessions(run_dir: Path) -> object:
    with open_run(run_dir) as conn:
        return counts(conn)["sessions"]


class Stopping:
    """The session of slot 0 finds that no session can run any more; another one would go on for ever."""

    def __init__(self, num_sessions: int):
        self._others = asyncio.Barrier(num_sessions)

    async def run(self, session: Session) -> list[ExportRecord]:
        await self._others.wait()
        if session.slot == 0:
            raise RunStopped("nothing can run")
        return await asyncio.Future()


@pytest.mark.parametrize("num_samples", [1, 2])
async def test_sessions_that_run_when_the_run_stops_are_written_as_cancelled(
    codec: TurnCodec, tmp_path: Path, num_samples: int
) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        ended = run_group(codec, tmp_path, lambda _: EachSession(Stopping(num_samples)), num_samples=num_samples)
        await asyncio.wait_for(ended, 10)
    assert caught.group_contains(RunStopped, match="nothing can run")
    assert sessions(tmp_path) == {"cancelled": {"run_stopped": num_samples}}


class Losing:
    """The process of the agents dies twice."""

    def __init__(self, sample: Sample):
        self._sample = sample

    async def run(self, session: Session) -> list[ExportRecord]:
        if session.try_index < 2:
            raise SessionFailure(RUNNER_LOST, "the process died")
        return await self._sample(session)


async def test_a_lost_runner_costs_neither_retries_nor_budget(codec: TurnCodec, tmp_path: Path) -> None:
    result = await run_group(codec, tmp_path, lambda sample: EachSession(Losing(sample)), max_failures=1)
    assert [sample.reward for sample in result.samples] == [2.0]
    assert sessions(tmp_path) == {"exported": {"none": 1}, "failed": {"runner_lost": 2}}


class TriesAgain:
    """Samples a slot three times; the last time it fails."""

    whole_groups = True

    def __init__(self, sample: Sample):
        self._sample = sample

    async def run(self, sessions: Sequence[Session], again: Again) -> Mapping[str, SessionResult]:
        (first,) = sessions
        tries = [first, again(first), again(first)]
        results: dict[str, SessionResult] = {one.session_id: await self._sample(one) for one in tries[:2]}
        return {**results, tries[2].session_id: SessionFailure("agent_exit", "worse")}


async def test_of_several_tries_the_last_with_records_counts(codec: TurnCodec, tmp_path: Path) -> None:
    result = await run_group(codec, tmp_path, TriesAgain)
    assert [sample.reward for sample in result.samples] == [1.0] and result.end is None
    assert sessions(tmp_path) == {"exported": {"none": 1}, "failed": {"agent_exit": 1, "left_out_by_loop": 1}}
