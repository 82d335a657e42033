"""From forest to training: which state is exported, and its tokens root to leaf."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Literal

from silva.forest.joined_lineage import join_lineage
from silva.forest.node import EchoAlias, Node
from silva.forest.session_forest import SessionForest
from silva.types import (
    ExportRecord,
    JsonObject,
    NodeRow,
    SessionFailure,
    SharedPrefix,
    TrainingSample,
    VersionSpan,
    join_spans,
)

UNSAMPLED_VERSION = -1
ExportMode = Literal["strict", "last", "leaves"]


def exported_leaves(forest: SessionForest, mode: ExportMode) -> list[Node]:
    """The responses that end the contexts of a session whose agent named none; in the order in which they were written.

    strict: the one leaf of a linear history. last: the response that was written last, whatever else there is. leaves:
    every response that nothing follows. Raises SessionFailure as `linear_leaf`.
    """
    responses = [node for node in forest.nodes if node.kind == "response"]
    if mode == "strict" or not responses:
        return [linear_leaf(forest)]
    if mode == "last":
        return responses[-1:]
    return [node for node in responses if not node.children]


def linear_leaf(forest: SessionForest) -> Node:
    """The one response that ends a strictly linear history: one root, one leaf, no abandoned branch with a response.

    Raises SessionFailure: `no_response` where nothing was committed, `not_linear` with the other roots and leaves
    named.
    """
    responses = [node for node in forest.nodes if node.kind == "response"]
    if not responses:
        raise SessionFailure("no_response", "the session holds no answer of the model")
    leaf = responses[-1]
    on_path = {node.node_id for node in leaf.path()}
    roots = [node for node in forest.nodes if node.parent is not None and node.parent.kind == "root"]
    stray = [node for node in responses if node.node_id not in on_path]
    if not stray and len(roots) == 1:
        return leaf
    ends = [node for node in stray if not node.children]
    places = ", ".join(f"response {node.node_id} (request {node.request_id})" for node in ends[:8])
    starts = ", ".join(f"node {node.node_id} (request {node.request_id})" for node in roots[:8])
    raise SessionFailure(
        "not_linear",
        f"the session's history is not linear, so no single context can be exported: {len(roots)} root(s): {starts}; "
        f"besides the last response ({leaf.node_id}, request {leaf.request_id}) there are {len(ends)} other "
        f"leaf/leaves: {places or 'none'}. `silva explain` names what differs. Make the agent send "
        "one growing history, or write a record with a name for each context to be exported; or export with "
        "--agentic-export last (the context of the last response) or leaves (every leaf's)",
    )


def build_samples(
    forest: SessionForest,
    records: Iterable[ExportRecord],
    *,
    session_id: str,
    group_id: str,
    shared_prefix: SharedPrefix = "once",
) -> tuple[TrainingSample, ...]:
    """The exported contexts of a session, one for each record and in their order.

    Under `once`, what several of them share is trained by the first one only; a context of which nothing is left then
    has a mask of zeros.
    """
    trained: set[int] = set()
    samples: list[TrainingSample] = []
    for record in records:
        samples.append(build_sample(forest, record, session_id=session_id, group_id=group_id, trained=trained))
        if shared_prefix == "once":
            trained.update(node.node_id for node in forest.nodes[record.node_id].path())
    return tuple(samples)


def build_sample(
    forest: SessionForest,
    record: ExportRecord,
    *,
    session_id: str,
    group_id: str,
    trained: Set[int] = frozenset(),
) -> TrainingSample:
    """The exported lineage as one sample: ids as the engine saw and returned them, mask 1 on sampled ids only.

    Nodes in `trained` are trained by another sample already: here they are context, with mask 0 (and their versions).
    """
    node = forest.nodes[record.node_id]
    joined = join_lineage(map(_node_row, node.path()))
    joined.mask_out((span.start, span.length) for span in joined.responses if span.node_id in trained)
    return TrainingSample(
        session_id=session_id,
        group_id=group_id,
        name=record.name,
        node_id=record.node_id,
        prompt_len=joined.responses[0].start,
        token_ids=joined.token_ids,
        loss_mask=joined.loss_mask,
        logprobs=joined.logprobs,
        kept_mass=joined.kept_mass,
        version_spans=joined.version_spans,
        responses=joined.responses,
        reward=record.reward,
        helpers=record.helpers,
        truncated=node.cut,
        metadata=record.metadata,
        images=tuple(image.reference for image in node.path_images()),
    )


def node_rows(forest: SessionForest) -> list[NodeRow]:
    """Every node in the form that is stored and shown."""
    return [_node_row(node) for node in forest.nodes]


def _node_row(node: Node) -> NodeRow:
    lead = (VersionSpan(start=0, length=node.lead, version=UNSAMPLED_VERSION),) if node.lead else ()
    tools: list[JsonObject] | None = None
    kwargs: JsonObject | None = None
    if node.kind == "root":
        tools, kwargs = list(node.conversation.tools), node.conversation.template_kwargs
    return NodeRow(
        node_id=node.node_id,
        parent_id=None if node.parent is None else node.parent.node_id,
        state_key=node.key.hex(),
        kind=node.kind,
        messages=[message.to_chat() for message in node.messages],
        token_ids=node.ids.tolist(),
        loss_mask=[0] * node.lead + [1] * (len(node.ids) - node.lead),
        logprobs=[0.0] * node.lead + node.logprobs.tolist(),
        kept_mass=[1.0] * node.lead + node.kept_mass.tolist(),
        version_spans=join_spans((*lead, *node.spans)),
        finish_reason=node.finish,
        num_aborts=node.num_aborts,
        tools=tools,
        template_kwargs=kwargs,
        told=None if node.told is None or node.told == node.messages[0] else node.told.to_chat(),
        spellings=[_spelling_row(alias) for alias in node.spellings],
    )


def _spelling_row(alias: EchoAlias) -> JsonObject:
    return {
        "key": alias.key.hex(),
        "node_id": alias.node.node_id,
        "beyond": None if alias.beyond is None else alias.beyond.hex(),
        "renames": dict(alias.repair.renames),
    }
