"""Turns of ids: invariants over random trees, beside conversations of messages in the same session."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from restored import assert_same_forest, restored

from silva.forest.identity import message_digest
from silva.forest.lineage import build_samples, exported_leaves, linear_leaf
from silva.forest.node import Node
from silva.forest.placement import Placement, Response
from silva.forest.record_faults import RecordHistory, why_unmatched
from silva.forest.records import ToldHistories
from silva.forest.session_forest import SessionForest
from silva.types.generation import GenerateResult, VersionSpan
from silva.types.messages import Conversation, Message
from silva.types.rollout import ExportRecord

CONVERSATION = Conversation(template_kwargs={})
HELLO, HI = Message(role="user", content="hello"), Message(role="assistant", content="hi")

# Few different ids, so that turns often repeat one another.
ids = st.lists(st.integers(0, 2), min_size=1, max_size=3)
versions = st.integers(0, 3)


def result(ids: list[int], version: int = 0) -> GenerateResult:
    return GenerateResult(
        ids=ids,
        logprobs=[-0.5 * (at + 1) for at in range(len(ids))],
        kept_mass=[1.0] * len(ids),
        finish_reason="stop",
        version_spans=(VersionSpan(start=0, length=len(ids), version=version),),
    )


def talk(forest: SessionForest) -> Node:
    """One turn of messages."""
    match = forest.match(CONVERSATION, [message_digest(HELLO)])
    placement = Placement(match=match, messages=(HELLO,), observation_ids=(0, 1), lead_ids=(1,))
    return forest.commit(placement, Response(result=result([2, 1]), message=HI, digest=message_digest(HI)))


@settings(max_examples=150, deadline=None)
@given(st.data(), st.booleans())
def test_random_trees_keep_every_id(data: st.DataObject, messages_too: bool) -> None:
    forest = SessionForest()
    said = talk(forest) if messages_too else None
    engine: dict[int, tuple[list[int], list[int]]] = {}  # response -> what the engine read, what it returned
    for turn in range(data.draw(st.integers(1, 8))):
        parent = data.draw(st.sampled_from([None, *(node for node in forest.nodes if node.num_tokens)]))
        given_ids = data.draw(ids if parent is None else st.just([]) | ids)
        sampled, version = data.draw(ids), data.draw(versions)
        before, num_nodes = [] if parent is None else parent.path_ids().tolist(), len(forest.nodes)
        node = forest.append_tokens(parent, given_ids, result(sampled, version), request_id=f"r{turn}")
        engine[node.node_id] = ([*before, *given_ids], sampled)
        assert node is forest.nodes[-1] and node.sampled.tolist() == sampled and forest.node_of(node.key) is node
        assert len(forest.nodes) - num_nodes <= 3
        observations = [(node.parent and node.parent.node_id, node.ids.tobytes(), node.key) for node in forest.nodes]
        assert len({at for at, node in zip(observations, forest.nodes, strict=True) if node.kind != "response"}) == sum(
            node.kind != "response" for node in forest.nodes
        )
    if messages_too:  # histories of messages lead to their own states only
        match = forest.match(CONVERSATION, [message_digest(HELLO), message_digest(HI)], (HELLO, HI).__getitem__, True)
        assert match.parent is said and match.is_full and not match.aliases

    leaves = exported_leaves(forest, "leaves")
    records = [ExportRecord(name=str(leaf.node_id), node_id=leaf.node_id, reward=1.0) for leaf in leaves]
    samples = build_samples(forest, records, session_id="s", group_id="g")
    trained: set[int] = set()
    for sample, leaf in zip(samples, leaves, strict=True):
        assert len(sample.token_ids) == len(sample.loss_mask) == len(sample.logprobs) == len(sample.kept_mass)
        assert sum(span.length for span in sample.version_spans) == len(sample.token_ids)
        for span in sample.responses:
            end = span.start + span.length
            if span.node_id in engine:
                prompt, sampled = engine[span.node_id]
                assert sample.token_ids[: span.start] == prompt and sample.token_ids[span.start : end] == sampled
            mask = set(sample.loss_mask[span.start : end])
            assert mask == ({0} if span.node_id in trained else {1})
            trained.add(span.node_id)
        assert sample.token_ids == leaf.path_ids().tolist()

    again = restored(forest)
    assert_same_forest(forest, again)
    assert build_samples(again, records, session_id="s", group_id="g") == samples


def test_the_same_ids_are_one_observation_and_two_responses() -> None:
    forest = SessionForest()
    first = forest.append_tokens(None, [1, 2], result([3]))
    second = forest.append_tokens(None, [1, 2], result([3]))
    assert first.parent is second.parent and first is not second and first.key == second.key
    assert forest.node_of(first.key) is second and forest.next_sibling(first.before) == 2


def test_an_observation_and_a_response_of_the_same_ids_are_two_states() -> None:
    forest = SessionForest()
    start = forest.append_tokens(None, [1], result([1]))
    sampled = forest.append_tokens(start, [], result([5]))
    given_first = forest.append_tokens(start, [5], result([5]))
    assert given_first.parent is not None and given_first.parent.key != sampled.key


@pytest.mark.parametrize(
    ("observation", "sampled"),
    [([], [1]), ([1], []), ([1 << 40], [1]), ([1], [1 << 40])],
    ids=["no prompt", "nothing sampled", "given id too big", "sampled id too big"],
)
def test_a_refused_turn_writes_nothing(observation: list[int], sampled: list[int]) -> None:
    forest = SessionForest()
    with pytest.raises((ValueError, OverflowError)):
        forest.append_tokens(None, observation, result(sampled))
    assert not forest.nodes
    forest.append_tokens(None, [1], result([2]))
    assert [node.kind for node in forest.nodes] == ["root", "observation", "response"]


def test_a_record_of_messages_meets_no_turn_of_ids() -> None:
    forest = SessionForest()
    leaf = forest.append_tokens(None, [1], result([2]))
    assert linear_leaf(forest) is leaf
    told = ToldHistories(forest.nodes)
    digests = [message_digest(HELLO)]
    search = told.find(b"", digests, (HELLO,).__getitem__, lenient=True)
    history = RecordHistory(conversation=CONVERSATION, digests=digests, message_at=(HELLO,).__getitem__)
    assert "no history of messages" in why_unmatched(told, history, search, lenient=True)
