"""From the nodes of a lineage to per-token lists: the one way, for a live forest, for stored rows and for their proof.

root                observation      response
()                  9 4 7            2 5 1        token_ids
                    0 0 0            0 1 1        loss_mask (the opening of a response was not sampled)
                                     ^ start of the response's sampled ids
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from silva.types import NodeRow, ResponseSpan, VersionSpan, join_spans


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedLineage:
    """The tokens from the root to a node, in one piece.

    Example: one observation `9 4` and one response `5 1`, sampled by version 3:
    `token_ids [9, 4, 5, 1], loss_mask [0, 0, 1, 1], responses (node 2 from 2, length 2)`.
    """

    token_ids: list[int]
    """All ids, [T]."""
    loss_mask: list[int]
    """1 where the id was sampled and trains, [T]."""
    logprobs: list[float]
    """Log-probs where the mask is 1, else 0.0, [T]."""
    kept_mass: list[float]
    """Probability that top-p and top-k left in play where the mask is 1, else 1.0, [T]."""
    version_spans: tuple[VersionSpan, ...]
    """Weight versions over the T tokens, also of masked ids."""
    responses: tuple[ResponseSpan, ...]
    """The sampled ids of each response, in order."""

    def mask_out(self, runs: Iterable[Sequence[int]]) -> None:
        """Make the ids of these (start, length) runs context: they were sampled, but train elsewhere."""
        for start, length in runs:
            self.loss_mask[start : start + length] = [0] * length
            self.logprobs[start : start + length] = [0.0] * length
            self.kept_mass[start : start + length] = [1.0] * length


def join_lineage(path: Iterable[NodeRow]) -> JoinedLineage:
    """Join what the nodes of a path add, from the root on."""
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    kept_mass: list[float] = []
    spans: list[VersionSpan] = []
    responses: list[ResponseSpan] = []
    for step in path:
        ids += step.token_ids
        mask += step.loss_mask
        logprobs += step.logprobs
        kept_mass += step.kept_mass
        spans += step.version_spans
        if step.kind == "response":
            length = sum(step.loss_mask)
            responses.append(ResponseSpan(node_id=step.node_id, start=len(ids) - length, length=length))
    return JoinedLineage(
        token_ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        kept_mass=kept_mass,
        version_spans=join_spans(spans),
        responses=tuple(responses),
    )
