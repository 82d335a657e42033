"""Numbers of one rollout step that only the ledger knows: its requests and its engine calls."""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Iterable

from silva.types import Mode

_SESSIONS = "sessions JOIN groups USING (group_id) WHERE step = ? AND groups.mode = ?"


def gateway_numbers(conn: sqlite3.Connection, rollout_id: int, *, mode: Mode = "train") -> dict[str, float]:
    """The HTTP requests of a step's ended sessions, failed ones too: `gateway/requests`, `gateway/errors_<code>` by the
    code that was answered, and `gateway/wait_s` and `gateway/latency_s`, means over the requests (a latency: of those
    that were answered).
    """
    rows = conn.execute(
        "SELECT http_status, error_code, wait_s, latency_s FROM requests "
        f"WHERE session_id IN (SELECT session_id FROM {_SESSIONS})",
        (rollout_id, mode),
    ).fetchall()
    errors = Counter(code or f"status_{status}" for status, code, _, _ in rows if code or (status or 0) >= 400)
    numbers = {"gateway/requests": float(len(rows))}
    numbers |= {f"gateway/errors_{code}": float(number) for code, number in sorted(errors.items())}
    latencies_s = [latency_s for *_, latency_s in rows if latency_s is not None]
    for name, values in (("wait_s", [wait_s for *_, wait_s, _ in rows]), ("latency_s", latencies_s)):
        if values:
            numbers[f"gateway/{name}"] = math.fsum(values) / len(values)
    return numbers


def engine_busy(conn: sqlite3.Connection, rollout_id: int, *, mode: Mode = "train") -> float | None:
    """The share of the time from the first start to the last end of a step's sessions in which the engine had a call of
    theirs; None where no time passed.
    """
    at = (rollout_id, mode)
    began_s, ended_s = conn.execute(f"SELECT min(started_s), max(ended_s) FROM {_SESSIONS}", at).fetchone()
    if began_s is None or ended_s is None or ended_s <= began_s:
        return None
    calls = conn.execute(
        "SELECT s.started_s + a.started_s, s.started_s + a.ended_s FROM attempts a JOIN sessions s USING (session_id) "
        f"WHERE session_id IN (SELECT session_id FROM {_SESSIONS})",
        at,
    )
    return min(1.0, covered((begin_s, end_s) for begin_s, end_s in calls) / (ended_s - began_s))


def start_lag(conn: sqlite3.Connection, rollout_id: int, *, mode: Mode = "train") -> dict[str, float]:
    """`rollout/start_lag/mean|max`: how many steps before this one its groups were started; {} without groups."""
    mean, most = conn.execute(
        "SELECT avg(step - start_step), max(step - start_step) FROM groups WHERE step = ? AND mode = ?",
        (rollout_id, mode),
    ).fetchone()
    return {} if mean is None else {"rollout/start_lag/mean": float(mean), "rollout/start_lag/max": float(most)}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of some (begin, end)."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
