"""Rollout steps whose agents are functions in the test's process; gateway, groups, producer and ledger are real."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway_serve import Serve, serving

from silva.codec import TurnCodec
from silva.data.prompts import PromptSource
from silva.data.rows import Dataset, Row
from silva.judge.group_end import GroupSettings
from silva.rollout.failure_budget import FailureBudget
from silva.rollout.group_driver import EachSession
from silva.rollout.group_runner import GroupRunner
from silva.run.policy import SyncPolicy
from silva.run.producer import Producer
from silva.store.ledger import RunLedger
from silva.turns.session import Session
from silva.types.errors import SessionFailure
from silva.types.rollout import ExportRecord, Samples, SessionInput

Agent = Callable[["Talk"], Awaitable[list[ExportRecord]]]


@dataclass
class Talk:
    """What an agent in the process has: its place and the model API."""

    row: int
    slot: int
    session: Session
    serve: Serve

    async def ask(self, text: str, after: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """One turn, in a new conversation or after another one; the conversation with its answer."""
        messages = [*after, {"role": "user", "content": text}]
        return [*messages, await self.serve.message(self.session.session_id, messages)]

    def last(self) -> int:
        """The node of the last answer."""
        return max(node.node_id for node in self.session.forest.nodes if node.kind == "response")


class _Driver:
    def __init__(self, serve: Serve, agent: Agent):
        self._serve = serve
        self._agent = agent

    async def run(self, session: Session) -> list[ExportRecord]:
        assert session.row is not None
        return await self._agent(Talk(session.row, session.slot, session, self._serve))


class _AsGiven:
    """The rewards of the agents, or none."""

    @property
    def group_wise(self) -> bool:
        return False

    async def judge_session(self, session: Session, samples: Samples) -> Samples:
        return samples

    async def judge_group(
        self, ended: Sequence[tuple[Session, Samples]], failed_slots: Mapping[int, str]
    ) -> list[Samples | SessionFailure]:
        raise AssertionError("never asked")


@asynccontextmanager
async def producing(
    codec: TurnCodec, run_dir: Path, agent: Agent, *, rows: int, num_samples: int
) -> AsyncIterator[Producer]:
    """A producer of one epoch of rows, all of them in one step; failed sessions are not run again."""
    dataset = Dataset(
        path=Path("rows"), rows=tuple(Row(line=n, input=SessionInput(metadata={"n": n})) for n in range(rows))
    )
    with RunLedger(run_dir) as ledger:
        async with serving(codec, [{"text": "ok"}], open_sessions=False) as serve:
            budget = FailureBudget(99)
            producer = Producer(
                source=PromptSource(dataset, num_epoch=1, shuffle=False, seed=0),
                groups=GroupRunner(
                    registry=serve.registry,
                    driver=EachSession(_Driver(serve, agent)),
                    leases=serve.leases,
                    ledger=ledger,
                    budget=budget,
                    rewards=_AsGiven(),
                ),
                ledger=ledger,
                budget=budget,
                policy=SyncPolicy(batch_size=rows, concurrency=rows, replace=False),
                group_settings=GroupSettings(mode="train", num_samples=num_samples, min_size=1, num_retries=0),
            )
            async with producer:
                yield producer
