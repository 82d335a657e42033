"""Turns that a repeated request may join: those in the making, and the last ones that ended.

A client that lost a reply asks again. Such a request joins the turn of the first one, so that nothing is sampled twice
and the forest gets no sibling. An equal body alone is no proof of a repetition (agents sample the same prompt several
times): it needs evidence, see `HeldTurn.accepts`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from silva.gateway.http import Delivery, Header, Scope, header
from silva.turns import PreparedTurn, TurnTask
from silva.types import RequestRow, TurnOptions, TurnReply

MAX_ENDED = 16
"""How many ended turns of a session can still be joined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What the head of a request says about whether it repeats an earlier one."""

    idempotency_key: str | None = None
    """Value of the header of that name; None where it is missing or empty."""
    is_retry: bool = False
    """True where an SDK counts this request as a retry."""

    @classmethod
    def of(cls, scope: Scope) -> Evidence:
        count = header(scope, b"x-stainless-retry-count") or ""
        return cls(
            idempotency_key=header(scope, b"idempotency-key") or None,
            is_retry=count.isdecimal() and len(count) < 10 and int(count) > 0,
        )


class HeldTurn:
    """One turn with the requests that wait for it.

    The first request makes it, later ones join it. It is committed only while at least one of them waits.
    """

    def __init__(self, *, asked: bytes, evidence: Evidence, record: RequestRow, created_s: float):
        self.asked = asked
        """Digest of what the requests ask for."""
        self.idempotency_key = evidence.idempotency_key
        self.record = record
        """The row of the request that began the turn."""
        self.created_s = created_s
        self.ready: asyncio.Future[tuple[Header, ...] | None] = asyncio.get_running_loop().create_future()
        """Done when the turn is placed (response headers), or when it failed before that (None)."""
        self.wanted = asyncio.Event()
        """Set while a request waits."""
        self.dropped = False
        """True while the turn is being cancelled."""
        self.task: TurnTask
        """Makes the turn."""
        self.waiting: list[RequestRow] = []
        self._delivery: Delivery | None = None

    @property
    def head(self) -> tuple[Header, ...] | None:
        """Response headers that are known before the turn is made; None until it is placed."""
        return self.ready.result() if self.ready.done() else None

    @property
    def is_made(self) -> bool:
        """Whether it was committed."""
        ended = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        return ended and isinstance(self.task.result(), TurnReply)

    def begin(self, task: TurnTask) -> None:
        """Let `task` make the turn."""
        self.task = task
        task.add_done_callback(lambda _: self.ready.done() or self.ready.set_result(None))

    def placed(self, turn: PreparedTurn) -> None:
        repairs = str(turn.num_repairs).encode()
        self.ready.set_result(((b"x-silva-state", turn.state.encode()), (b"x-silva-repairs", repairs)))

    async def until_wanted(self) -> None:
        await self.wanted.wait()

    @contextmanager
    def wait(self, record: RequestRow) -> Iterator[None]:
        """This request waits for the turn, or gets its reply, while the block runs."""
        self.waiting.append(record)
        self.wanted.set()
        try:
            yield
        finally:
            self.waiting.remove(record)
            if not self.waiting:
                self.wanted.clear()

    def delivered(self, delivery: Delivery) -> None:
        """Note that the whole reply was written to this connection."""
        self._delivery = delivery

    @property
    def is_lost(self) -> bool:
        """Whether nobody waits for it and, as far as the connections show, its reply reached nobody."""
        return not self.wanted.is_set() and (self._delivery is None or self._delivery.reset)

    @property
    def is_abandoned(self) -> bool:
        """Whether it is still in the making and nobody waits for it."""
        return not self.task.done() and not self.wanted.is_set()

    def drop(self) -> None:
        """Cancel it, uncommitted."""
        self.dropped = True
        self.task.cancel()

    def accepts(self, evidence: Evidence) -> bool:
        """Whether a request with the same body repeats this one, and does not want another sample."""
        if self.dropped:
            return False
        if evidence.idempotency_key and self.idempotency_key:
            return evidence.idempotency_key == self.idempotency_key
        return evidence.is_retry or self.is_lost


class HeldTurns:
    """The turns of one session that can be joined, by the digest of their request."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, list[HeldTurn]] = {}
        self._ended_turns: dict[HeldTurn, None] = {}

    def find(self, asked: bytes, evidence: Evidence) -> HeldTurn | None:
        """The turn that a request repeats: a turn whose reply was lost wins, then the newest."""
        found = (turn for turn in self._by_digest.get(asked, ()) if turn.accepts(evidence))
        return max(found, key=lambda turn: turn.is_lost, default=None)

    def knows(self, asked: bytes) -> bool:
        """Whether the same was asked before and is not forgotten yet."""
        return asked in self._by_digest

    def add(self, turn: HeldTurn) -> None:
        """Add a turn that just began. It is forgotten when it is cancelled, or when MAX_ENDED others ended after it."""
        self._by_digest.setdefault(turn.asked, []).insert(0, turn)
        turn.task.add_done_callback(lambda _: self._ended(turn))

    def abandoned(self) -> list[HeldTurn]:
        """The turns in the making that nobody waits for."""
        return [turn for turns in self._by_digest.values() for turn in turns if turn.is_abandoned]

    def forget(self, turn: HeldTurn) -> None:
        """Let nobody join this turn from now on."""
        self._ended_turns.pop(turn, None)
        turns = self._by_digest.get(turn.asked, [])
        if turn in turns:
            turns.remove(turn)
        if not turns:
            self._by_digest.pop(turn.asked, None)

    def _ended(self, turn: HeldTurn) -> None:
        if turn.task.cancelled() or turn.task.exception() is not None:
            self.forget(turn)
            return
        self._ended_turns[turn] = None
        while len(self._ended_turns) > MAX_ENDED:
            self.forget(next(iter(self._ended_turns)))


def body_digest(protocol: str, root: bytes, options: TurnOptions, messages: Sequence[bytes]) -> bytes:
    """Digest of all that a request asks for, in canonical form; how its reply travels (stream or not) is no part.

    `root` is the key of the empty conversation with the request's tools and template arguments; `messages` are the
    digests that identify them.
    """
    asked = (protocol, options.model, options.max_tokens, options.stop, options.seed, options.logprobs)
    digest = hashlib.blake2b(repr(asked).encode("utf-8", "surrogatepass"), digest_size=16)
    digest.update(root)
    for message in messages:
        digest.update(message)
    return digest.digest()
