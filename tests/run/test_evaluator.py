"""An evaluation ends its own prompts and never ends the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from contexts import context

from silva.data.prompts import Prompt
from silva.data.rows import Dataset, Row
from silva.judge.group_end import GroupResult, GroupSettings
from silva.rollout.failure_budget import FailureBudget
from silva.run.evaluator import Evaluator
from silva.store.ledger import RunLedger
from silva.store.queries import open_run
from silva.types.errors import GroupEnd
from silva.types.rollout import SessionInput


class Groups:
    """Groups of one session each, of which those of these rows are dropped."""

    def __init__(self, dropped: set[int]):
        self._dropped = dropped

    async def run(
        self, prompt: Prompt, settings: GroupSettings, *, start_step: int, attempt: int, left: Callable[[], None]
    ) -> GroupResult:
        left()
        end = GroupEnd("all_sessions_failed", "none left") if prompt.row in self._dropped else None
        samples = () if end else (context(f"s-{prompt.row}", None, [(2, 3)], reward=0.5),)
        return GroupResult(prompt=prompt, group_id=f"g-{prompt.row}", samples=samples, failures=(), end=end)


async def test_an_evaluation_ends_its_prompts_and_goes_on_where_all_its_groups_fail(tmp_path: Path) -> None:
    rows = tuple(Row(line=n, input=SessionInput(metadata={"n": n})) for n in range(2))
    with RunLedger(tmp_path) as ledger:
        for name, dropped in (("some", {1}), ("none", {0, 1})):
            evaluator = Evaluator(
                datasets={name: Dataset(path=Path("rows"), rows=rows)},
                groups=Groups(dropped),  # pyright: ignore[reportArgumentType]
                ledger=ledger,
                budget=FailureBudget(99),
                concurrency=2,
                settings=GroupSettings(mode="eval", num_samples=1, min_size=1, num_retries=0),
            )
            (result,) = await evaluator.run(3)
            num_left = 2 - len(dropped)
            assert (result.num_sessions, result.num_failed) == (num_left, len(dropped))
            assert result.mean_reward == (0.5 if num_left else None)
        ledger.flush()
    with open_run(tmp_path) as conn:
        found = conn.execute("SELECT prompt_id, state, train_step FROM prompts ORDER BY rowid").fetchall()
    assert [tuple(row) for row in found] == [
        ("eval-some-3:0:0", "delivered", 3),
        ("eval-some-3:0:1", "dropped", 3),
        ("eval-none-3:0:0", "dropped", 3),
        ("eval-none-3:0:1", "dropped", 3),
    ]
