"""RLOO: how much better a session did than the others of its group (Ahmadian et al. 2024, "Back to Basics")."""

from __future__ import annotations

from collections.abc import Sequence

from silva.credit.spread import centred


def leave_one_out(rewards_G: Sequence[float]) -> list[float]:
    """`r - (mean of the others)`, which is `(r - mean) * n / (n - 1)`; exactly 0.0 for all without a spread."""
    num = len(rewards_G)
    return [c * num / (num - 1) if c else 0.0 for c in centred(rewards_G)]
