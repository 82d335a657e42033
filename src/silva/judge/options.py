"""Options of rewards and credit, and of the user functions that give them."""

from __future__ import annotations

from dataclasses import dataclass

from silva.credit import CreditShare
from silva.export import ExportOptions
from silva.types import opt


@dataclass(frozen=True, kw_only=True)
class RewardOptions(ExportOptions):
    """Who gives rewards and credit."""

    custom_rm_path: str | None = opt("reward", None, metavar="PATH")
    """Function f(args, sample) that rewards contexts without a reward (docs/rewards.md)."""
    group_rm: bool = opt("reward", False)
    """Call --custom-rm-path once for a whole group, as f(args, samples)."""
    reward_timeout_s: float = opt("reward", 30.0, metavar="SECONDS", above=0)
    """Limit of one call of a user function, in seconds."""
    reward_max_concurrency: int = opt("reward", 64, low=1)
    """Calls of user functions at once; at most 4 per core where the function is not async."""
    reward_retries: int = opt("reward", 1, low=0)
    """New calls of a reward function that raised, hung or crashed."""
    reward_failure_score: float | None = opt("reward", None, low=-1000000000000.0, high=1000000000000.0)
    """Reward where the function failed after its retries (default: the session fails)."""
    agentic_custom_advantage_path: str | None = opt("reward", None, metavar="PATH")
    """Function f(metadata_by_slot) that gives each context its credit (docs/credit.md)."""
    agentic_credit: CreditShare | None = opt("reward", None)
    """What each of several contexts gets of its session's credit: all, or its share of the sampled tokens (default:
    training refuses several contexts)."""

    @property
    def has_custom_advantage(self) -> bool:
        """A user function turns outcomes into credit; then no reward is needed."""
        return self.agentic_custom_advantage_path is not None
