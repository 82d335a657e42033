"""Samples anew from what a run recorded: other exports, rewards and credits, without agents."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

import msgspec

from silva.data import Prompt
from silva.export import Exporter, export_session, session_samples
from silva.forest import SessionForest, restore_forest
from silva.judge import (
    CreditStage,
    GroupSettings,
    Outcome,
    RewardStage,
    SlotEnd,
    close_group,
    judge_group,
    judge_session,
)
from silva.rollout.open_sessions import OPEN_DATASET
from silva.rollout.process_driver import NO_OUTPUT_REASONS
from silva.store import Context, DumpLine, StoredSession, load_session, session_lines, session_rows, short_floats
from silva.turns import Session
from silva.types import Mode, PromptState, SessionFailure, SessionInput, SystemClock, TrainingSample

log = logging.getLogger("silva.rollout")

LEDGER_DAMAGED = "ledger_damaged"
"""Reason of a session whose rows in the ledger cannot be read."""
REWARD_MISSING = "reward_missing"

State = tuple[PromptState, str | None]
"""How a prompt ended, and why; None where its state needs no reason."""


@dataclass(kw_only=True, slots=True)
class Side:
    """Counts of one mode, as recorded or as made anew. States are (state, reason) pairs, the reason None for none.

    Rewards are those of exported sessions that have one.
    """

    sessions: Counter[tuple[str, str | None]] = field(default_factory=Counter[tuple[str, "str | None"]])
    """By (status, reason)."""
    groups: Counter[tuple[str, str | None]] = field(default_factory=Counter[tuple[str, "str | None"]])
    """By (state, reason) of their prompts."""
    num_contexts: int = 0
    """Contexts of all sessions."""
    rewards: list[float] = field(default_factory=list[float])
    """Of exported sessions that have one."""

    def count(self, row: DumpLine, num_contexts: int) -> None:
        self.sessions[row.status, row.reason] += 1
        self.num_contexts += num_contexts
        if row.status == "exported" and row.session_reward is not None:
            self.rewards.append(row.session_reward)


@dataclass(kw_only=True, slots=True)
class Account:
    """What became of the sessions of one mode. `num_left_out`: later tries of slots whose earlier one is exported now;
    `num_without_credit`: exported sessions whose reward makes no credit.
    """

    before: Side = field(default_factory=Side)
    """As recorded."""
    after: Side = field(default_factory=Side)
    """As made anew."""
    num_left_out: int = 0
    """Later tries of slots whose earlier one is exported now."""
    num_without_credit: int = 0
    """Exported sessions whose reward makes no credit."""


@dataclass(kw_only=True, eq=False)
class _Anew:
    """A recorded session. `session` is it opened again; None for one that stays as it is."""

    row: DumpLine
    end: SlotEnd


@dataclass(eq=False)
class Reexport:
    """Builds the samples of recorded groups anew.

    Consumes the ledger, group by group; waits for the functions of the user; produces the lines of a dump. Sessions of
    which an agent did not end well stay as they are. `credit` gives the contexts of a training group their credit.
    `width` groups are in memory at once.
    """

    conn: sqlite3.Connection
    """Reads the ledger."""
    _: KW_ONLY
    exporter: Exporter
    """Picks the contexts."""
    rewards: RewardStage
    """Judges sessions, or whole groups."""
    credit: CreditStage
    """Gives training groups their credit."""
    settings: Mapping[Mode, GroupSettings]
    """How groups end, by mode."""
    width: int = 1
    """Groups in memory at once."""

    def __post_init__(self) -> None:
        self._clock = SystemClock()
        self.accounts: dict[Mode, Account] = {}

    async def step(self, rollout_id: int, write: Callable[[DumpLine], object]) -> None:
        """Give `write` the lines of one rollout step, in the order of its dump."""
        rows = session_rows(self.conn, rollout_id)
        waiting: deque[asyncio.Task[list[DumpLine]]] = deque()
        async with asyncio.TaskGroup() as tasks:
            for _, group in itertools.groupby(rows, lambda row: row.group_id):
                waiting.append(tasks.create_task(self._group(list(group))))
                if len(waiting) >= self.width:
                    _write_all(await waiting.popleft(), write)
            while waiting:
                _write_all(await waiting.popleft(), write)

    async def _group(self, rows: list[DumpLine]) -> list[DumpLine]:
        """The lines of one group."""
        account = self.accounts.setdefault(rows[0].mode, Account())
        for row in rows:
            account.before.count(row, self._num_contexts(row))
        account.before.groups[rows[0].prompt_state, rows[0].prompt_reason] += 1
        sessions = [kept for _, slot in itertools.groupby(rows, lambda row: row.slot) for kept in self._slot(slot)]
        account.num_left_out += len(rows) - len(sessions)
        state = await self._close(rows[0], sessions, account)
        account.after.groups[state] += 1
        lines: list[DumpLine] = []
        for anew in sessions:
            samples, session = anew.end.outcome.samples, anew.end.session
            row = _ended(anew.row, state, anew.end.outcome)
            account.after.count(row, len(samples))
            contexts = [] if session is None else [_context(session.forest, sample) for sample in samples]
            lines += session_lines(self.conn, row, contexts)
        return lines

    def _num_contexts(self, row: DumpLine) -> int:
        (number,) = self.conn.execute("SELECT count(*) FROM samples WHERE session_id = ?", (row.session_id,)).fetchone()
        return number

    # -- export -----------------------------------------------------------------------------------------------------

    def _slot(self, tries: Iterable[DumpLine]) -> Iterator[_Anew]:
        """The tries of a slot up to the first that is exported now: after it no other would have been made."""
        for row in tries:
            session, outcome = self._export(row)
            yield _Anew(
                row=row, end=SlotEnd(slot=row.slot, session_id=row.session_id, session=session, outcome=outcome)
            )
            if session is not None:
                return

    def _export(self, row: DumpLine) -> tuple[Session | None, Outcome]:
        """The session opened again with its contexts; without one where it stays as recorded, or fails now."""
        recorded = Outcome(
            status=row.status,
            reason=row.reason,
            message=row.error,
            reward=row.session_reward,
            metadata=row.session_metadata,
        )
        if row.status not in ("exported", "failed") or row.reason in NO_OUTPUT_REASONS:
            return None, recorded
        where = f"session {row.session_id}"
        try:
            stored = load_session(self.conn, row.session_id)
            if stored.output is None and row.reason in ("output_invalid", "internal_error"):
                return None, recorded  # what it wrote was not kept, or it is not known that its agent ended
            session = self._open(row, stored)
            records = export_session(self.exporter, session)
            samples = session_samples(session, records, self.settings[session.mode].shared_prefix)
        except SessionFailure as failure:
            return None, Outcome.failed(failure)
        except (ValueError, TypeError, LookupError) as error:
            failure = SessionFailure(LEDGER_DAMAGED, f"{where} cannot be read from the ledger: {error}")
            return None, Outcome.failed(failure)
        return session, Outcome.exported(samples)

    def _open(self, row: DumpLine, stored: StoredSession) -> Session:
        session = Session(
            session_id=row.session_id,
            group_id=row.group_id,
            mode=row.mode,
            clock=self._clock,
            forest=restore_forest(stored.nodes, stored.request_ids()),
            input=stored.input,
            label=stored.label,
            output=stored.output,
            prompt_id=row.prompt_id,
            slot=row.slot,
            try_index=row.try_index,
            row=row.row,
            requests=stored.requests,
        )
        session.ended = True
        return session

    # -- rewards and credit -----------------------------------------------------------------------------------------

    async def _close(self, row: DumpLine, sessions: Sequence[_Anew], account: Account) -> State:
        """Rewards and credit by the rule of a live group, and how the prompt ends then. One that has not ended yet is
        left so.
        """
        ends = list({anew.end.slot: anew.end for anew in sessions}.values())
        settings = replace(self.settings[row.mode], num_samples=row.group_size)
        exported = [end.outcome for end in ends]
        await asyncio.gather(*(self._judge(settings, end) for end in ends))
        found = await judge_group(settings, self.rewards, ends)
        if row.dataset == OPEN_DATASET:  # sessions that clients opened need no reward
            for end, outcome in zip(ends, exported, strict=True):
                end.outcome = outcome if end.outcome.reason == REWARD_MISSING else end.outcome
        result = await close_group(
            settings, ends, prompt=_prompt(row, ends), group_id=row.group_id, credit=self.credit, end=found
        )
        if result.end is None and settings.mode == "train":
            contexts = (end.outcome.samples for end in ends)
            account.num_without_credit += sum(any(one.credit is None for one in some) for some in contexts)
        if row.prompt_state == "pending":
            return "pending", row.prompt_reason
        if result.end is not None:
            return result.end.state, result.end.reason
        return "trained" if row.prompt_state == "trained" else "delivered", None

    async def _judge(self, settings: GroupSettings, end: SlotEnd) -> None:
        if end.session is not None:
            end.outcome = await judge_session(settings, self.rewards, end.session, end.outcome.samples)


def _prompt(row: DumpLine, ends: Sequence[SlotEnd]) -> Prompt:
    """The group's prompt, with what its sessions were given."""
    session = next((end.session for end in ends if end.session is not None), None)
    return Prompt(
        prompt_id=row.prompt_id,
        dataset=row.dataset,
        epoch=row.epoch,
        row=row.row,
        position=row.position,
        input=(session and session.input) or SessionInput(metadata={}),
        label=session and session.label,
    )


def _ended(row: DumpLine, state: State, outcome: Outcome) -> DumpLine:
    """The line of a session with its new end, and that of its prompt."""
    prompt_state, prompt_reason = state
    return msgspec.structs.replace(
        row,
        prompt_state=prompt_state,
        prompt_reason=prompt_reason,
        status=outcome.status,
        reason=outcome.reason,
        error=outcome.message,
        session_reward=outcome.reward,
        session_metadata=outcome.metadata,
    )


def _write_all(lines: Iterable[DumpLine], write: Callable[[DumpLine], object]) -> None:
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
