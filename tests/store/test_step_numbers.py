"""What the ledger tells of a step's requests and engine calls, read from real ledgers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_records import begin, exported, failed, requests

from silva.store.ledger import RunLedger
from silva.store.queries import open_run
from silva.store.step_numbers import covered, engine_busy, gateway_numbers
from silva.types.clock import SystemClock


class _SetClock(SystemClock):
    now_s = 100.0

    def wall_s(self) -> float:
        return self.now_s


def test_requests_and_engine_calls_of_a_step(tmp_path: Path) -> None:
    (call,) = exported("s", "g").attempts
    clock = _SetClock()
    with RunLedger(tmp_path, clock=clock) as ledger:
        group = begin(ledger, 0, n=2)
        clock.now_s = 102.0
        other = begin(ledger, 1)
        eval_group = begin(ledger, 2, mode="eval")
        # calls from 100.5 to 102 and, twice at the same time, from 104 to 105, in a step from 100 to 110
        calls = [replace(call, started_s=0.5, ended_s=2.0), replace(call, started_s=4.0, ended_s=4.5)]
        ledger.end_session(exported(f"{group}-s0", group, attempts=calls))
        broken = replace(requests()[0], http_status=503, error_code="engine_error", wait_s=0.3, latency_s=0.75)
        late = replace(call, started_s=2.0, ended_s=3.0)
        ledger.end_session(failed(f"{other}-s0", other, requests=[broken], attempts=[late]))
        ledger.end_session(exported(f"{eval_group}-s0", eval_group, mode="eval"))
        clock.now_s = 110.0
        ledger.end_session(failed(f"{group}-s1", group))
        ledger.flush()
        with open_run(tmp_path) as conn:
            assert gateway_numbers(conn, 0) == {
                "gateway/requests": 3,
                "gateway/errors_context_length_exceeded": 1,
                "gateway/errors_engine_error": 1,
                "gateway/wait_s": pytest.approx(0.4 / 3),
                "gateway/latency_s": pytest.approx(0.5),
            }
            assert engine_busy(conn, 0) == pytest.approx((1.5 + 1.0) / 10)
            assert (gateway_numbers(conn, 9), engine_busy(conn, 9)) == ({"gateway/requests": 0}, None)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=9))
def test_time_in_which_calls_overlap_counts_once(calls: list[tuple[int, int]]) -> None:
    seconds = {at for begin_s, length in calls for at in range(begin_s, begin_s + length)}
    assert covered((begin_s, begin_s + length) for begin_s, length in calls) == len(seconds)
