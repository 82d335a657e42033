"""Contexts of sessions, made by hand: turns that some of them share."""

from __future__ import annotations

from typing import Any

from silva.types.generation import VersionSpan
from silva.types.rollout import ResponseSpan, TrainingSample
from silva.types.sample_view import GroupView

Turns = list[tuple[int, int]]
"""(node, sampled tokens) of each response of a context."""
PROMPT = 2
GROUP = GroupView(group_id="g", row_metadata={}, label=None, slots=[], failed_slots={})
"""For credit stages that do not look at it."""


def context(
    session: str,
    name: str | None,
    turns: Turns,
    *,
    reward: float | None = None,
    trained: set[int] | None = None,
    metadata: dict[str, Any] | None = None,
) -> TrainingSample:
    """A context with these turns; those of nodes in `trained` (None: all) have mask 1."""
    ids, mask, responses = [1] * PROMPT, [0] * PROMPT, []
    for node, length in turns:
        ids.append(2)
        mask.append(0)
        responses.append(ResponseSpan(node_id=node, start=len(ids), length=length))
        ids += [3 + (node + at) % 20 for at in range(length)]
        mask += [int(trained is None or node in trained)] * length
    return TrainingSample(
        session_id=session,
        group_id=session.partition("-")[0],
        name=name,
        node_id=turns[-1][0],
        prompt_len=responses[0].start,
        token_ids=ids,
        loss_mask=mask,
        logprobs=[-1.0 * bit for bit in mask],
        kept_mass=[1.0] * len(ids),
        version_spans=(VersionSpan(start=0, length=len(ids), version=0),),
        responses=tuple(responses),
        reward=reward,
        metadata=metadata or {},
    )


def forked(session: str, names: str, reward: float | None = None) -> list[TrainingSample]:
    """Contexts that share a first turn of 3 tokens (node 2), each with a second one of its own; the first trains it."""
    return [
        context(session, name, [(2, 3), (4 + at, 1 + at)], reward=reward, trained={2, 4} if at == 0 else {4 + at})
        for at, name in enumerate(names)
    ]
