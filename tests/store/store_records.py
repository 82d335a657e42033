"""Small session records for the tests of the ledger, built the way a forest builds them."""

from __future__ import annotations

import itertools
from typing import Any

from silva.store.ledger import RunLedger
from silva.types.generation import VersionSpan
from silva.types.rollout import (
    AttemptRow,
    NodeRow,
    RequestRow,
    ResponseSpan,
    SessionRow,
    TokenUsage,
    TrainingSample,
)


def node(node_id: int, parent_id: int | None, kind: Any, ids: list[int], num_lead: int, **more: Any) -> NodeRow:
    """A node whose first `num_lead` ids were given and whose other ids were sampled by version 1 + node_id."""
    num_sampled = len(ids) - num_lead
    spans = [VersionSpan(start=0, length=num_lead, version=-1)] if num_lead else []
    if num_sampled:
        spans.append(VersionSpan(start=num_lead, length=num_sampled, version=1 + node_id))
    return NodeRow(
        node_id=node_id,
        parent_id=parent_id,
        state_key=f"key{node_id:02d}",
        kind=kind,
        messages=more.pop("messages", [{"role": "user", "content": f"m{node_id}"}]),
        token_ids=ids,
        loss_mask=[0] * num_lead + [1] * num_sampled,
        logprobs=[0.0] * num_lead + [-0.1 * (at + 1) for at in range(num_sampled)],
        kept_mass=[1.0] * num_lead + [0.9] * num_sampled,
        version_spans=tuple(spans),
        finish_reason="stop" if kind == "response" else None,
        **more,
    )


def joined(nodes: list[NodeRow], leaf: int, **more: Any) -> TrainingSample:
    """The sample of one leaf; `more` sets its other fields."""
    by_id = {item.node_id: item for item in nodes}
    path: list[NodeRow] = []
    at: int | None = leaf
    while at is not None:
        path.insert(0, by_id[at])
        at = by_id[at].parent_id
    spans: list[VersionSpan] = []
    for item in path:
        for span in item.version_spans:
            start = sum(other.length for other in spans)
            if spans and spans[-1].version == span.version:
                last = spans.pop()
                spans.append(VersionSpan(start=last.start, length=last.length + span.length, version=span.version))
            else:
                spans.append(VersionSpan(start=start, length=span.length, version=span.version))
    fields: dict[str, Any] = {
        "name": None,
        "prompt_len": next(at for at, mask in enumerate(i for n in path for i in n.loss_mask) if mask),
        "token_ids": [i for item in path for i in item.token_ids],
        "loss_mask": [i for item in path for i in item.loss_mask],
        "logprobs": [i for item in path for i in item.logprobs],
        "kept_mass": [i for item in path for i in item.kept_mass],
        "reward": 1.0,
    }
    ends = list(itertools.accumulate(len(item.token_ids) for item in path))
    responses = tuple(
        ResponseSpan(node_id=item.node_id, start=end - sum(item.loss_mask), length=sum(item.loss_mask))
        for item, end in zip(path, ends, strict=True)
        if item.kind == "response"
    )
    return TrainingSample(node_id=leaf, version_spans=tuple(spans), **{**fields, "responses": responses, **more})


def forest() -> list[NodeRow]:
    """Root, observation, response, then two branches of observation and response."""
    return [
        node(0, None, "root", [], 0, messages=[], tools=[{"type": "function"}], template_kwargs={}),
        node(1, 0, "observation", [5, 6, 7], 3),
        node(2, 1, "response", [1, 8, 9, 2], 1, num_aborts=2),
        node(3, 2, "observation", [10, 11], 2),
        node(4, 3, "response", [1, 12, 2], 1),
        node(5, 2, "observation", [13], 1),
        node(6, 5, "response", [1, 14, 15], 1),
    ]


def requests() -> list[RequestRow]:
    return [
        RequestRow(
            request_id="r0",
            protocol="chat",
            stream=False,
            arrived_s=0.5,
            match="root",
            node_id=2,
            http_status=200,
            finish_reason="stop",
            usage=TokenUsage(prompt_tokens=4, completion_tokens=3),
            wait_s=0.1,
            latency_s=0.25,
        ),
        RequestRow(
            request_id="r1",
            protocol="messages",
            stream=True,
            arrived_s=1.5,
            match="branch",
            repairs=["trimmed"],
            difference={"pointer": "/messages/2/content", "old": "a", "new": "b"},
            http_status=400,
            error_code="context_length_exceeded",
        ),
    ]


def exported(session_id: str, group_id: str, **more: Any) -> SessionRow:
    """A session with one implicit context (or the `samples` given)."""
    nodes = more.pop("nodes", None) or forest()
    fields: dict[str, Any] = {
        "mode": "train",
        "status": "exported",
        "reason": None,
        "error": None,
        "reward": 1.0,
        "metadata": {"task": 1},
        "requests": requests(),
        "attempts": [
            AttemptRow(
                request_id="r0",
                attempt=0,
                num_input=4,
                num_output=3,
                finish_reason="stop",
                weight_version=3,
                cached_tokens=0,
                started_s=0.6,
                ended_s=0.7,
            )
        ],
        "samples": [joined(nodes, min(4, len(nodes) - 1), session_id=session_id, group_id=group_id)],
    }
    return SessionRow(session_id=session_id, group_id=group_id, nodes=nodes, **{**fields, **more})


def failed(session_id: str, group_id: str, reason: str = "agent_exit", **more: Any) -> SessionRow:
    fields: dict[str, Any] = {
        "status": "failed",
        "error": "exit 3",
        "reward": None,
        "metadata": {},
        "samples": [],
        "requests": [],
        "attempts": [],
    }
    return exported(session_id, group_id, reason=reason, **{**fields, **more})


def begin(ledger: RunLedger, number: int, *, n: int = 1, rollout_id: int = 0, mode: Any = "train") -> str:
    """Issue prompt `number`, start its group and the sessions of all slots. Returns the group id."""
    group_id = f"{mode}-g{number}"
    ledger.issue_prompt(f"{mode}:0:{number}", dataset=mode, epoch=0, row=number, position=number, mode=mode)
    ledger.start_group(group_id, prompt_id=f"{mode}:0:{number}", n=n, start_step=rollout_id)
    for slot in range(n):
        ledger.start_session(f"{group_id}-s{slot}", group_id=group_id, slot=slot)
    return group_id
