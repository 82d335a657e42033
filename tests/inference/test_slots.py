"""Slot bookkeeping: whatever happens, a slot never claims a cached id that its cache row does not hold."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.inference.slots import MIN_SHARED, CopyPlan, Slot, SlotTable, common_prefix

NUM_SLOTS = 4
MAX_IDS = 64

# Few sessions and few distinct ids, so that prefixes are shared often.
prompts = st.builds(
    lambda shared, tail: ([0] * shared + tail)[: MAX_IDS - 8],
    st.sampled_from([0, 10, 20, 30]),
    st.lists(st.integers(0, 1), min_size=1, max_size=20),
)
operations = st.one_of(
    st.tuples(st.just("admit"), st.integers(0, 3), prompts),
    st.tuples(st.just("compute"), st.integers(1, 24)),
    st.tuples(st.just("end"), st.integers(0, 3)),
    st.tuples(st.just("close"), st.integers(0, 3)),
    st.tuples(st.just("invalidate")),
)


class Machine:
    """Plays the engine: `rows` is what was really written to the cache."""

    def __init__(self) -> None:
        self.table = SlotTable(NUM_SLOTS, MAX_IDS)
        self.rows: list[list[int]] = [[-1] * MAX_IDS for _ in range(NUM_SLOTS)]
        self.live: list[Slot] = []

    def run(self, operation: tuple) -> None:
        kind, *args = operation
        getattr(self, kind)(*args)

    def admit(self, session: int, ids: list[int]) -> None:
        slot = self.table.admit(str(session), np.array(ids, dtype=np.int32))
        assert (slot is None) == (len(self.live) == NUM_SLOTS)
        if slot is not None:
            assert all(slot is not other for other in self.live)
            assert slot.ids.tolist() == ids
            assert slot.num_pending >= 1
            self.live.append(slot)

    def compute(self, budget: int) -> None:
        for slot in sorted(self.live, key=lambda slot: slot.order):
            plan = self.table.next_copy(slot)
            if isinstance(plan, CopyPlan):
                assert plan.start == slot.num_filled < plan.stop < slot.num_ids
                self.rows[slot.index][plan.start : plan.stop] = self.rows[plan.source][plan.start : plan.stop]
                slot.num_filled = plan.stop
            elif plan:
                continue
            length = min(slot.num_pending, budget)
            span = slice(slot.num_filled, slot.num_filled + length)
            self.rows[slot.index][span] = slot.buffer[span].tolist()
            slot.num_filled += length
            if slot.num_pending == 0 and slot.num_ids < MAX_IDS:
                slot.append(int(slot.num_ids % 2))

    def end(self, at: int) -> None:
        if at < len(self.live):
            self.table.release(self.live.pop(at))

    def close(self, session: int) -> None:
        self.table.close_session(str(session))
        held = [slot for slot in self.table.slots if slot.session_id == str(session)]
        assert all(slot.live and slot.closing for slot in held)

    def invalidate(self) -> None:
        self.table.invalidate()
        self.rows = [[-1] * MAX_IDS for _ in range(NUM_SLOTS)]

    def check(self) -> None:
        for slot in self.table.slots:
            assert slot.live == any(slot is other for other in self.live)
            assert 0 <= slot.num_filled <= slot.num_ids <= MAX_IDS
            assert self.rows[slot.index][: slot.num_filled] == slot.buffer[: slot.num_filled].tolist()


@settings(max_examples=100, deadline=None)
@given(st.lists(operations, max_size=30))
def test_filled_ids_are_always_really_cached(history: list[tuple]) -> None:
    machine = Machine()
    for operation in history:
        machine.run(operation)
        machine.check()
    # Nobody waits for ever: computing alone fills every live slot.
    for _ in range(NUM_SLOTS * MAX_IDS):
        machine.compute(1)
    machine.check()
    assert all(slot.num_filled >= MAX_IDS - 1 for slot in machine.live)


def test_idle_slots_are_evicted_least_recently_used_first() -> None:
    table = SlotTable(2, 32)
    slots = [table.admit(name, np.full(9, value, dtype=np.int32)) for value, name in enumerate("ab")]
    assert table.admit("c", np.full(9, 2, dtype=np.int32)) is None
    for slot in (slots[1], slots[0]):
        assert slot is not None
        slot.num_filled = 9
        table.release(slot)
    assert table.admit("c", np.full(9, 2, dtype=np.int32)) is slots[1]


def test_a_branch_does_not_cut_off_its_sibling_while_there_is_room() -> None:
    table = SlotTable(3, 64)
    first = table.admit("s", np.array([1] * 10 + [2] * 40, dtype=np.int32))
    assert first is not None
    first.num_filled = 50
    table.release(first)
    branch = table.admit("s", np.array([1] * 10 + [3] * 10, dtype=np.int32))
    assert branch is not None and branch is not first
    assert table.next_copy(branch) == CopyPlan(first.index, 0, 10)


def test_common_prefix() -> None:
    a = np.array([1, 2, 3, 4], dtype=np.int32)
    assert common_prefix(a, a) == 4
    assert common_prefix(a, a[:2]) == 2
    assert common_prefix(a, np.array([1, 2, 9, 4], dtype=np.int32)) == 2
    assert common_prefix(a, a[:0]) == 0
    assert MIN_SHARED > 0
