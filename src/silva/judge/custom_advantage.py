"""Credit by a function of the user, before a group counts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass

from silva.credit import CUSTOM_FAILED, hook_input, read_credits, spread_credits
from silva.types import GroupEnd, GroupView, Samples, SharedPrefix, SilvaError

ADVANTAGE_PARAMS = ("metadata_by_slot", "group")
"""The function's arguments, by the names that an error shows. It may do without the second."""

AdvantageFunction = Callable[..., Awaitable[object]]
"""Called with a HookInput, and with a GroupView where it takes the group."""


@dataclass(eq=False)
class CustomAdvantage:
    """Gives the contexts of a group the credits that a function of the user returns for it.

    Consumes all exported contexts of a group in the order of its slots; waits for the function, called once a group;
    produces the same contexts with credit. `failed` are the errors that mean that the function returned no value:
    the group is then dropped as `custom_advantage_failed`. Other errors are ours and pass.
    """

    function: AdvantageFunction
    """The function of the user."""
    _: KW_ONLY
    takes_group: bool = False
    """It takes the group as a second argument."""
    failed: type[SilvaError]
    """The errors that mean that it returned no value."""
    shared_prefix: SharedPrefix = "once"
    """How often turns that contexts share are trained."""
    path: str | None = None
    """Where the function is, for errors; None: they do not name it."""

    async def assign(self, samples: Samples, group: GroupView) -> Samples:
        """Raises GroupEnd: `custom_advantage_none` (filtered), `..._invalid`, `..._failed`."""
        try:
            value = await self.function(hook_input(samples), *([group] if self.takes_group else []))
        except self.failed as error:
            raise GroupEnd(CUSTOM_FAILED, f"the custom advantage function gave no value: {error}") from error
        try:
            credits = read_credits(value, samples)
        except GroupEnd as end:
            if self.path is None:
                raise
            raise GroupEnd(end.reason, f"{self.path}: {end}", state=end.state) from end
        return spread_credits(samples, credits, shared_prefix=self.shared_prefix)
