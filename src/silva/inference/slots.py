"""The slots of the prefix cache: who owns each, which ids it contains, which prefix a new request can take over.

Pure bookkeeping, without torch. Everything cached belongs to the current weight version: `invalidate` forgets it all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MIN_SHARED = 8
"""Fewest ids worth a copy from another slot, or a wait for one."""

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Donor:
    """Another slot with the same first ids."""

    slot: int
    """Its index."""
    epoch: int
    """Its epoch then; valid while it still has this one."""
    length: int
    """How many leading ids are the same."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Cache positions that can be copied from another slot."""

    source: int
    """Its index."""
    start: int
    """The first position."""
    stop: int
    """The position after the last."""


@dataclass(slots=True)
class Slot:
    """One row of the cache. A live slot runs a request; an idle one only keeps its prefix for later."""

    index: int
    """Its place in the table and in the cache."""
    buffer: Ids
    """Room for the ids of a whole context."""
    num_ids: int = 0
    """Ids known so far."""
    num_filled: int = 0
    """Ids, from the first, whose keys and values are cached."""
    session_id: str | None = None
    """The session of its ids; None while it is empty."""
    live: bool = False
    """A request runs in it."""
    closing: bool = False
    """Its session was closed: it is freed when the request ends."""
    epoch: int = 0
    """How often its content was replaced."""
    order: int = 0
    """Admission number of the running request."""
    last_used: int = 0
    """Tick of the last release."""
    donor: Donor | None = None
    """The slot whose prefix it waits for or copies; None: it computes alone."""

    @property
    def ids(self) -> Ids:
        return self.buffer[: self.num_ids]

    @property
    def num_pending(self) -> int:
        return self.num_ids - self.num_filled

    def append(self, token_id: int) -> None:
        self.buffer[self.num_ids] = token_id
        self.num_ids += 1

    def clear(self) -> None:
        self.num_ids = self.num_filled = 0
        self.session_id = None
        self.donor = None
        self.closing = False
        self.epoch += 1


@dataclass(slots=True)
class SlotTable:
    """All slots of one cache of `max_ids` positions. Evicts idle slots, least recent first."""

    num_slots: int
    max_ids: int
    slots: list[Slot] = field(init=False)
    _tick: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.slots = [Slot(i, np.empty(self.max_ids, dtype=np.int32)) for i in range(self.num_slots)]

    @property
    def num_cached(self) -> int:
        return sum(slot.num_filled for slot in self.slots)

    def admit(self, session_id: str, ids: Ids) -> Slot | None:
        """Give `ids` (not empty) a slot, keeping what it already contains of them; None while all slots are live.

        At least one id stays pending, because logits come from computing it. `donor` is set where another slot
        contains, or will contain, more of the prefix.
        """
        shared = [min(common_prefix(slot.ids, ids), len(ids) - 1) for slot in self.slots]
        target = self._target(session_id, shared)
        if target is None:
            return None
        keep = min(shared[target.index], target.num_filled)
        self._tick += 1
        target.buffer[: len(ids)] = ids
        target.num_ids, target.num_filled = len(ids), keep
        target.session_id, target.live, target.closing = session_id, True, False
        target.epoch += 1
        target.order = self._tick
        target.donor = self._best_donor(target, shared)
        return target

    def release(self, slot: Slot) -> None:
        """End the request of a slot. Its computed prefix stays cached, unless its session was closed meanwhile."""
        self._tick += 1
        slot.live, slot.donor, slot.last_used = False, None, self._tick
        slot.num_ids = slot.num_filled
        if slot.closing or slot.num_filled == 0:
            slot.clear()

    def drop(self, slot: Slot) -> None:
        """End the request of a slot and forget its content."""
        slot.live = False
        slot.clear()

    def close_session(self, session_id: str) -> None:
        """Free the session's idle slots now and its live ones when they end."""
        for slot in self.slots:
            if slot.session_id != session_id:
                continue
            if slot.live:
                slot.closing = True
            else:
                slot.clear()

    def invalidate(self) -> None:
        """New weights: idle slots become empty; live ones keep their ids and start over, sharing prefixes again."""
        live = sorted((slot for slot in self.slots if slot.live), key=lambda slot: slot.order)
        for slot in self.slots:
            if slot.live:
                slot.num_filled = 0
                slot.epoch += 1
            else:
                slot.clear()
        for at, slot in enumerate(live):
            shared = [0] * self.num_slots
            for earlier in live[:at]:
                shared[earlier.index] = min(common_prefix(earlier.ids, slot.ids), slot.num_ids - 1)
            slot.donor = self._best_donor(slot, shared)

    def next_copy(self, slot: Slot) -> CopyPlan | bool:
        """What a slot with a donor does now: copy, wait for the donor to get further (True), or continue alone (False).

        Clears the donor unless the answer is to wait. The caller copies and then counts the ids as filled.
        """
        donor = slot.donor
        if donor is None:
            return False
        source = self.slots[donor.slot]
        valid = source.epoch == donor.epoch
        if valid and source.live and source.num_filled < donor.length:
            return True
        slot.donor = None
        stop = min(donor.length, source.num_filled)
        if not valid or stop <= slot.num_filled:
            return False
        return CopyPlan(source.index, slot.num_filled, stop)

    def _target(self, session_id: str, shared: Sequence[int]) -> Slot | None:
        idle = [slot for slot in self.slots if not slot.live]
        if not idle:
            return None
        empty = next((slot for slot in idle if slot.num_ids == 0), None)
        own = [slot for slot in idle if slot.session_id == session_id and min(shared[slot.index], slot.num_filled)]
        if own:
            best = max(own, key=lambda slot: min(shared[slot.index], slot.num_filled))
            # Another branch of the session may still want what does not match: rather copy than cut most of it off.
            if empty is None or 2 * shared[best.index] >= best.num_filled:
                return best
        return empty or min(idle, key=lambda slot: slot.last_used)

    def _best_donor(self, target: Slot, shared: Sequence[int]) -> Donor | None:
        others = [slot for slot in self.slots if slot is not target and shared[slot.index] > 0]
        if not others:
            return None

        def ready(slot: Slot) -> int:
            return min(shared[slot.index], slot.num_filled)

        best = max(others, key=ready)
        later = max((slot for slot in others if slot.live), key=lambda slot: shared[slot.index], default=best)
        if shared[later.index] >= ready(best) + MIN_SHARED:
            best, length = later, shared[later.index]
        else:
            length = ready(best)
        if length < target.num_filled + MIN_SHARED:
            return None
        return Donor(best.index, best.epoch, length)


def common_prefix(a: Ids, b: Ids) -> int:
    """How many leading ids two arrays share."""
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:
        return 0
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n
