"""Options of export."""

from __future__ import annotations

from dataclasses import dataclass

from silva.forest.lineage import ExportMode, SharedPrefix
from silva.forest.options import MatchOptions
from silva.types.option import opt


@dataclass(frozen=True, kw_only=True)
class ExportOptions(MatchOptions):
    """What is exported of a session."""

    agentic_export: ExportMode = opt(
        "matching",
        "strict",
        "What is exported of a session that names no context: the only leaf, else it fails; the last leaf; all leaves.",
    )
    agentic_shared_prefix: SharedPrefix = opt(
        "matching",
        "once",
        "How often a turn shared by several contexts is trained: once, with the mean of their credits, or in each.",
    )
    reward_key: str | None = opt(
        "reward", None, "Entry of reward objects that is the reward; the others are metrics.", metavar="KEY"
    )
    eval_reward_key: str | None = opt(
        "eval", None, "Entry of reward objects that counts in eval (default: --reward-key).", metavar="KEY"
    )
