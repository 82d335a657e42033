"""Options of export."""

from __future__ import annotations

from dataclasses import dataclass

from silva.forest import ExportMode, MatchOptions
from silva.types import Mode, SharedPrefix, opt


@dataclass(frozen=True, kw_only=True)
class ExportOptions(MatchOptions):
    """What is exported of a session."""

    agentic_export: ExportMode = opt("matching", "strict")
    """What a session exports that names no context: its only leaf, else it fails; the last leaf; all leaves."""
    agentic_shared_prefix: SharedPrefix = opt("matching", "once")
    """How often a turn shared by several contexts is trained: once, at their mean credit, or in each."""
    reward_key: str | None = opt("reward", None, metavar="KEY")
    """Entry of reward objects that is the reward; the others are metrics."""
    eval_reward_key: str | None = opt("eval", None, metavar="KEY")
    """Entry of reward objects that counts in eval (default: --reward-key)."""

    def reward_key_of(self, mode: Mode) -> str | None:
        """The entry of a reward object that counts in sessions of this mode."""
        return self.eval_reward_key or self.reward_key if mode == "eval" else self.reward_key
