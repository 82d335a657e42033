"""Options of rewards and credit, and of the user functions that give them."""

from __future__ import annotations

from dataclasses import dataclass

from silva.credit.assign import CreditShare
from silva.export.options import ExportOptions
from silva.types.option import opt


@dataclass(frozen=True, kw_only=True)
class RewardOptions(ExportOptions):
    """Who gives rewards and credit."""

    custom_rm_path: str | None = opt(
        "reward",
        None,
        "Function f(args, sample) that rewards contexts without a reward, as module.function (docs/rewards.md).",
        metavar="PATH",
    )
    group_rm: bool = opt("reward", False, "Call --custom-rm-path once for a whole group, as f(args, samples).")
    reward_timeout_s: float = opt(
        "reward", 30.0, "Most seconds of one call of a function of yours.", metavar="SECONDS", low=0, low_open=True
    )
    reward_max_concurrency: int = opt(
        "reward", 64, "Calls of functions of yours at once; sync ones at most 4 a core.", low=1
    )
    reward_retries: int = opt(
        "reward", 1, "How often a reward function that raised, hung or crashed is asked again.", low=0
    )
    reward_failure_score: float | None = opt(
        "reward",
        None,
        "Reward where the function failed after its retries (default: the session fails).",
        low=-1e12,
        high=1e12,
    )
    agentic_custom_advantage_path: str | None = opt(
        "reward",
        None,
        "Function f(metadata_by_slot) that gives each context its credit, as module.function (docs/credit.md).",
        metavar="PATH",
    )
    agentic_credit: CreditShare | None = opt(
        "reward",
        None,
        "What each of several contexts gets of its session's credit: all of it, or its share of the sampled tokens "
        "(default: several contexts are refused in training).",
    )

    @property
    def has_custom_advantage(self) -> bool:
        """A user function turns outcomes into credit; then no reward is needed."""
        return self.agentic_custom_advantage_path is not None
