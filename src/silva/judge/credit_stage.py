"""Credit from the rewards of a group, before the group counts."""

from __future__ import annotations

import functools

from silva.credit import CreditFunction, CreditShare, assign_group_credit
from silva.types import GroupView, Samples, SharedPrefix


class GroupCredit:
    """The built-in CreditStage.

    Consumes the contexts of a group with their rewards; produces the same contexts with credit. `credit_of` turns the
    rewards of its sessions into their credits, `share` says how a session's credit reaches its contexts, and
    `shared_prefix` how often turns that contexts share are trained.
    """

    def __init__(self, *, credit_of: CreditFunction, share: CreditShare, shared_prefix: SharedPrefix):
        self._assign = functools.partial(
            assign_group_credit, credit_of=credit_of, share=share, shared_prefix=shared_prefix
        )

    async def assign(self, samples: Samples, group: GroupView) -> Samples:
        """Contexts of a session whose reward makes no credit stay without one."""
        found = {(sample.session_id, sample.name): sample for sample in self._assign(samples)[0]}
        return tuple(found.get((sample.session_id, sample.name), sample) for sample in samples)
