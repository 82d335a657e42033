"""The groups that ended and count, until a step takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from silva.judge import GroupResult
from silva.rollout import GroupTally, tally
from silva.store import RunLedger
from silva.types import GroupEnd


class GroupBuffer:
    """Keeps the groups that count, settles those that do not.

    Consumes GroupResults; waits for nothing; produces the groups of a step. The prompt of a group that does not count
    ends in the ledger here, with its reason; the others stay pending until whoever takes them says what became of them.
    """

    def __init__(self, ledger: RunLedger):
        self._ledger = ledger
        self.held: list[GroupResult] = []
        """Groups that count, in the order in which they ended."""
        self.num_ended: Counter[str] = Counter()
        """Groups that do not count, since the last step was taken, by their state."""
        self.last_end: GroupEnd | None = None
        """Why the last of them does not count."""
        self._tallies: list[GroupTally] = []

    def put(self, result: GroupResult, *, step: int) -> None:
        """`step` is the one that is being filled: a group that does not count was given up in it."""
        end = result.end
        if end is None:
            self.held.append(result)
            return
        self.num_ended[end.state] += 1
        self.last_end = end
        self._tallies.append(tally(result))
        self._ledger.end_prompts([result.prompt.prompt_id], end.state, reason=end.reason, train_step=step)

    def take(self, groups: Sequence[GroupResult]) -> list[GroupTally]:
        """Let these groups go with a step; returns the slots of those that did not count since the last one."""
        taken = {group.group_id for group in groups}
        self.held = [group for group in self.held if group.group_id not in taken]
        ended, self._tallies = self._tallies, []
        self.num_ended.clear()
        return ended
