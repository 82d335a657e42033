"""Who opens and closes gates, and what that does to a session."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from manual_clock import ManualClock

import silva
from silva.forest.session_forest import SessionForest
from silva.inference.scripted import ScriptedEngine, ScriptLine
from silva.rollout.leases import Leases
from silva.turns.session import Session

OWNER = "rollout/leases.py"


def test_nothing_but_the_leases_opens_or_closes_a_gate() -> None:
    root = Path(str(silva.__file__)).parent
    callers: set[str] = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of_gate = isinstance(node.func.value, ast.Attribute) and node.func.value.attr == "gate"
                if node.func.attr in ("open_gate", "close_gate") or (of_gate and node.func.attr in ("set", "clear")):
                    callers.add(path.relative_to(root).as_posix())
    assert callers == {OWNER, "turns/session.py"}, "turns/session.py defines the two"


async def test_active_time_runs_while_a_lease_is_held(codec) -> None:
    clock = ManualClock()
    engine = ScriptedEngine([ScriptLine(text="ok")], codec=codec, clock=clock)
    leases = Leases(engine)
    session = Session(session_id="s", group_id="g", mode="train", clock=clock, forest=SessionForest())
    assert not session.gate.is_set()
    leases.grant(session)
    await clock.advance(2)
    leases.park(session)
    assert (leases.num_running, leases.num_parked, session.gate.is_set()) == (0, 1, False)
    await clock.advance(5)
    leases.resume(session)
    await clock.advance(1)
    assert (leases.num_running, leases.num_parked, session.gate.is_set()) == (1, 0, True)
    assert leases.usage() == engine.usage()
    for _ in range(2):
        leases.release(session)
        assert (leases.num_running, session.gate.is_set()) == (0, False)
    assert session.active.elapsed_s() == pytest.approx(3.0)
    with pytest.raises(AssertionError, match="holds no lease"):
        leases.park(session)
