"""Samples anew from what a run recorded: other exports, rewards and credits, without agents."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from silva.credit.assign import CreditShare, assign_group_credit
from silva.credit.spread import CreditFunction
from silva.export.exporter import Exporter
from silva.export.session_export import export_session, session_samples
from silva.forest.lineage import SharedPrefix
from silva.forest.restore import restore_forest
from silva.forest.session_forest import SessionForest
from silva.judge.group_end import CreditStage, GroupSettings, Outcome, RewardStage, too_few_left
from silva.rollout.driver import NO_OUTPUT_REASONS
from silva.rollout.open_sessions import OPEN_DATASET
from silva.store.dumps import session_lines, session_rows
from silva.store.encode import short_floats
from silva.store.queries import Context
from silva.store.stored import StoredSession, load_session
from silva.turns.session import Session
from silva.types.clock import SystemClock
from silva.types.errors import GroupEnd, SessionFailure
from silva.types.rollout import Mode, Samples, TrainingSample

log = logging.getLogger("silva.rollout")

LEDGER_DAMAGED = "ledger_damaged"
"""Reason of a session whose rows in the ledger cannot be read."""
REWARD_MISSING = "reward_missing"

Row = dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Side:
    """Counts of one mode, as recorded or as made anew. States are (state, reason) pairs, the reason None for none.

    Rewards are those of exported sessions that have one.
    """

    sessions: Counter[tuple[str, str | None]] = field(default_factory=Counter[tuple[str, "str | None"]])
    groups: Counter[tuple[str, str | None]] = field(default_factory=Counter[tuple[str, "str | None"]])
    num_contexts: int = 0
    rewards: list[float] = field(default_factory=list[float])

    def count(self, row: Row, num_contexts: int) -> None:
        self.sessions[row["status"], row["reason"]] += 1
        self.num_contexts += num_contexts
        if row["status"] == "exported" and row["session_reward"] is not None:
            self.rewards.append(row["session_reward"])


@dataclass(kw_only=True, slots=True)
class Account:
    """What became of the sessions of one mode. `num_left_out`: later tries of slots whose earlier one is exported now;
    `num_without_credit`: exported sessions whose reward makes no credit.
    """

    before: Side = field(default_factory=Side)
    after: Side = field(default_factory=Side)
    num_left_out: int = 0
    num_without_credit: int = 0


@dataclass(kw_only=True, eq=False)
class _Anew:
    """A recorded session, opened again. `outcome` is None for one that stays as it is."""

    row: Row
    session: Session | None = None
    outcome: Outcome | None = None


class GroupCredit:
    """Credit from the rewards of a group. `share`: how a session's reaches its contexts."""

    def __init__(self, *, credit_of: CreditFunction, share: CreditShare, shared_prefix: SharedPrefix):
        self._assign = functools.partial(
            assign_group_credit, credit_of=credit_of, share=share, shared_prefix=shared_prefix
        )

    async def assign(self, samples: Samples) -> Samples:
        """Contexts of sessions whose reward cannot be used are left out."""
        return tuple(self._assign(samples)[0])


class Reexport:
    """Builds the samples of recorded groups anew.

    Consumes the ledger, group by group; waits for the functions of the user; produces the lines of a dump. Sessions of
    which an agent did not end well stay as they are. `credit` gives the contexts of a training group their credit.
    `width` groups are in memory at once.
    """

    def __init__(
        self,
        conn: sqlite3.Connection,
        *,
        exporter: Exporter,
        rewards: RewardStage,
        credit: CreditStage,
        settings: Mapping[Mode, GroupSettings],
        width: int = 1,
    ):
        self._conn = conn
        self._exporter = exporter
        self._rewards = rewards
        self._credit = credit
        self._settings = settings
        self._width = width
        self._clock = SystemClock()
        self.accounts: dict[Mode, Account] = {}

    async def step(self, rollout_id: int, write: Callable[[Row], object]) -> None:
        """Give `write` the lines of one rollout step, in the order of its dump."""
        rows = session_rows(self._conn, rollout_id)
        waiting: deque[asyncio.Task[list[Row]]] = deque()
        async with asyncio.TaskGroup() as tasks:
            for _, group in itertools.groupby(rows, lambda row: row["group_id"]):
                waiting.append(tasks.create_task(self._group(list(group))))
                if len(waiting) >= self._width:
                    _write_all(await waiting.popleft(), write)
            while waiting:
                _write_all(await waiting.popleft(), write)

    async def _group(self, rows: list[Row]) -> list[Row]:
        """The lines of one group."""
        account = self.accounts.setdefault(rows[0]["mode"], Account())
        for row in rows:
            account.before.count(row, self._num_contexts(row))
        account.before.groups[rows[0]["prompt_state"], rows[0]["prompt_reason"]] += 1
        sessions = [kept for _, slot in itertools.groupby(rows, lambda row: row["slot"]) for kept in self._slot(slot)]
        account.num_left_out += len(rows) - len(sessions)
        end = await self._judge(sessions)
        end = await self._assign(sessions, account) if end is None else end
        state = self._group_state(rows[0], sessions, end)
        account.after.groups[state["prompt_state"], state["prompt_reason"]] += 1
        lines: list[Row] = []
        for anew in sessions:
            samples = () if anew.outcome is None else anew.outcome.samples
            row = {**anew.row, **state, **_ended(anew.outcome)}
            account.after.count(row, len(samples))
            forest = None if anew.session is None else anew.session.forest
            contexts = [] if forest is None else [_context(forest, sample) for sample in samples]
            lines += session_lines(self._conn, row, contexts)
        return lines

    def _num_contexts(self, row: Row) -> int:
        (number,) = self._conn.execute(
            "SELECT count(*) FROM samples WHERE session_id = ?", (row["session_id"],)
        ).fetchone()
        return number

    # -- export -----------------------------------------------------------------------------------------------------

    def _slot(self, tries: Iterable[Row]) -> Iterator[_Anew]:
        """The tries of a slot up to the first that is exported now: after it no other would have been made."""
        for row in tries:
            anew = self._export(row)
            yield anew
            if anew.outcome is not None and anew.outcome.status == "exported":
                return

    def _export(self, row: Row) -> _Anew:
        if row["status"] not in ("exported", "failed") or row["reason"] in NO_OUTPUT_REASONS:
            return _Anew(row=row)
        where = f"session {row['session_id']}"
        try:
            stored = load_session(self._conn, row["session_id"])
            if stored.output is None and row["reason"] in ("output_invalid", "internal_error"):
                return _Anew(row=row)  # what it wrote was not kept, or it is not known that its agent ended
            session = self._open(row, stored)
            records = export_session(self._exporter, session)
            samples = session_samples(session, records, self._settings[session.mode].shared_prefix)
        except SessionFailure as failure:
            return _Anew(row=row, outcome=Outcome.failed(failure))
        except (ValueError, TypeError, LookupError) as error:
            failure = SessionFailure(LEDGER_DAMAGED, f"{where} cannot be read from the ledger: {error}")
            return _Anew(row=row, outcome=Outcome.failed(failure))
        return _Anew(row=row, session=session, outcome=Outcome.exported(samples))

    def _open(self, row: Row, stored: StoredSession) -> Session:
        session = Session(
            session_id=row["session_id"],
            group_id=row["group_id"],
            mode=row["mode"],
            clock=self._clock,
            forest=restore_forest(stored.nodes, stored.request_ids()),
            input=stored.input,
            label=stored.label,
            output=stored.output,
            prompt_id=row["prompt_id"],
            requests=stored.requests,
        )
        session.ended = True
        return session

    # -- rewards and credit -----------------------------------------------------------------------------------------

    async def _judge(self, sessions: Sequence[_Anew]) -> GroupEnd | None:
        """Give the exported sessions of a group their rewards."""
        exported = [anew for anew in sessions if anew.session is not None]
        if not exported:
            return None
        pairs = [(anew.session, anew.outcome.samples) for anew in exported if anew.session and anew.outcome]
        if self._rewards.group_wise:
            try:
                verdicts = await self._rewards.judge_group(pairs)
            except GroupEnd as end:
                return end
        else:
            verdicts = await asyncio.gather(*(self._judge_one(session, samples) for session, samples in pairs))
        for anew, verdict in zip(exported, verdicts, strict=True):
            if not isinstance(verdict, SessionFailure):
                anew.outcome = Outcome.exported(verdict)
            elif verdict.reason != REWARD_MISSING or anew.row["dataset"] != OPEN_DATASET:
                anew.outcome = Outcome.failed(verdict)
        return None

    async def _judge_one(self, session: Session, samples: Samples) -> Samples | SessionFailure:
        try:
            return await self._rewards.judge_session(session, samples)
        except SessionFailure as failure:
            return failure

    async def _assign(self, sessions: Sequence[_Anew], account: Account) -> GroupEnd | None:
        """Give the contexts of a training group their credits."""
        exported = [anew.outcome for anew in sessions if anew.outcome is not None and anew.outcome.samples]
        settings: GroupSettings = self._settings[sessions[0].row["mode"]]
        if settings.mode != "train" or not exported:
            return None
        try:
            credited = await self._credit.assign(tuple(sample for outcome in exported for sample in outcome.samples))
        except GroupEnd as end:
            return end
        found = {(sample.session_id, sample.name): sample for sample in credited}
        for anew in sessions:
            if anew.outcome is None or not anew.outcome.samples:
                continue
            samples = tuple(found.get((one.session_id, one.name), one) for one in anew.outcome.samples)
            account.num_without_credit += any(sample.credit is None for sample in samples)
            anew.outcome = replace(anew.outcome, samples=samples)
        return None

    def _group_state(self, row: Row, sessions: Sequence[_Anew], end: GroupEnd | None) -> Row:
        """How the prompt of a group ends now. One that has not ended yet is left so."""
        if row["prompt_state"] == "pending":
            return {"prompt_state": "pending", "prompt_reason": row["prompt_reason"]}
        if end is not None:
            log.warning("group %s is %s (%s): %s", row["group_id"], end.state, end.reason, end)
            return {"prompt_state": end.state, "prompt_reason": end.reason}
        num_left = sum(anew.outcome is not None and anew.outcome.status == "exported" for anew in sessions)
        small = too_few_left(num_left, row["group_size"], self._settings[row["mode"]])
        if small is not None:
            return {"prompt_state": small.state, "prompt_reason": small.reason}
        return {"prompt_state": "trained" if row["prompt_state"] == "trained" else "delivered", "prompt_reason": None}


def _ended(outcome: Outcome | None) -> Row:
    """What the lines of a session say of its end, where that is a new one."""
    if outcome is None:
        return {}
    return {
        "status": outcome.status,
        "reason": outcome.reason,
        "error": outcome.message,
        "session_reward": outcome.reward,
        "session_metadata": outcome.metadata,
    }


def _write_all(lines: Iterable[Row], write: Callable[[Row], object]) -> None:
    for line in lines:
        write(line)


def _context(forest: SessionForest, sample: TrainingSample) -> Context:
    path = forest.nodes[sample.node_id].path()
    conversation = path[0].conversation
    return Context(
        sample=replace(sample, logprobs=_short(sample.logprobs, 0.0), kept_mass=_short(sample.kept_mass, 1.0)),
        state_key=path[-1].key.hex(),
        messages=[message.to_chat() for node in path for message in node.messages],
        tools=list(conversation.tools),
        template_kwargs=conversation.template_kwargs,
    )


def _short(values: list[float], plain: float) -> list[float]:
    """The values as the ledger's dump writes them; most are `plain`."""
    short = iter(short_floats([value for value in values if value != plain]))
    return [value if value == plain else next(short) for value in values]
