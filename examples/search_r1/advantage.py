"""Credit for the team's conversations: what each role did, compared with the same role in the group's other sessions.

With r the outcome of a session (1: the team's answer was right) and u the usefulness of a searcher's report (1: it was
the answer to a part of the question), a group's conversations get

    main         r                 minus the mean of r over the group's main conversations
    a searcher   u * (1 + r) / 2   minus the mean of that over all the group's searchers

Half of a searcher's pay is for its own right report, half for what the team made of it; a wrong report earns nothing.
Nothing is divided by a spread: where all did equally well, or one stands alone, the credit is exactly 0.
"""

from __future__ import annotations

from typing import Any


def advantage_func(metadata_by_slot: list[dict[str | None, dict[str, Any]]]) -> list[dict[str | None, float]]:
    """One number for each conversation, in the order and under the names that came in."""
    worth_by_slot = [{name: _worth(metadata) for name, metadata in slot.items()} for slot in metadata_by_slot]
    seen: dict[str, list[float]] = {}
    for metadata_by_name, worth_by_name in zip(metadata_by_slot, worth_by_slot, strict=True):
        for name, worth in worth_by_name.items():
            seen.setdefault(metadata_by_name[name]["role"], []).append(worth)
    mean = {role: sum(worths) / len(worths) for role, worths in seen.items()}
    return [
        {name: worth - mean[metadata_by_name[name]["role"]] for name, worth in worth_by_name.items()}
        for metadata_by_name, worth_by_name in zip(metadata_by_slot, worth_by_slot, strict=True)
    ]


def _worth(metadata: dict[str, Any]) -> float:
    outcome = float(metadata["outcome"])
    if metadata["role"] == "main":
        return outcome
    return float(metadata["usefulness"]) * (1.0 + outcome) / 2.0
