"""Exported contexts as functions of the user see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from silva.turns import Session
from silva.types import SampleView, TrainingSample

Decode = Callable[[Sequence[int]], str]


def sample_view(
    session: Session, sample: TrainingSample, decode: Decode, failed_slots: Mapping[int, str] | None = None
) -> SampleView:
    """One exported context of a session that ended. `decode` turns ids into text, special tokens included."""
    given = {} if session.input is None else session.input.to_json()
    cut = sample.prompt_len
    path = session.forest.nodes[sample.node_id].path()
    return SampleView(
        prompt=decode(sample.token_ids[:cut]),
        response=decode(sample.token_ids[cut:]),
        prompt_ids=sample.token_ids[:cut],
        response_ids=sample.token_ids[cut:],
        messages=[message.to_chat() for node in path for message in node.messages],
        label=session.label,
        metadata=sample.metadata,
        input=given,
        row_metadata=given.get("metadata") or {},
        slot=session.slot,
        failed_slots=dict(failed_slots or {}),
        reward=sample.reward,
        helpers=sample.helpers,
        status="truncated" if sample.truncated else "completed",
        name=sample.name,
        session_id=session.session_id,
        group_id=session.group_id,
        mode=session.mode,
        num_turns=sample.num_turns,
        truncated=sample.truncated,
    )
