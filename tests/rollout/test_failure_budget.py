"""When the budget of failed sessions is spent, and what its error says."""

from __future__ import annotations

import pytest

from silva.judge.group_end import SlotFailure
from silva.rollout.failure_budget import FailureBudget
from silva.types.errors import RunStopped


def test_a_good_session_starts_the_row_anew_and_the_error_carries_its_first_failure() -> None:
    budget = FailureBudget(3)
    for name in ("a", "b"):
        budget.failure(SlotFailure(session_id=name, reason="old", message="before the good one"))
    budget.success()
    for name in ("c", "d"):
        budget.failure(SlotFailure(session_id=name, reason="agent_exit", message=f"of {name}"))
    with pytest.raises(RunStopped) as stopped:
        budget.failure(SlotFailure(session_id="e", reason="no_response", message="of e"))
    assert str(stopped.value).splitlines() == [
        "3 sessions failed in a row (--agent-max-failures 3)",
        "Failed sessions since the last good one, by reason: agent_exit 2, no_response 1",
        "The first: session c, agent_exit: of c",
    ]
