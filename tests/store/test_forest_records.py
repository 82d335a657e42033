"""A forest's own records go through the ledger unchanged: the exported sample equals the one that was built."""

from __future__ import annotations

import struct
from pathlib import Path

from store_records import begin, exported

from silva.forest.lineage import build_sample, build_samples, exported_leaves, linear_leaf, node_rows
from silva.forest.placement import Placement, Response
from silva.forest.session_forest import SessionForest
from silva.store.documents import show_session
from silva.store.ledger import RunLedger
from silva.store.queries import load_samples, open_run
from silva.types.generation import GenerateResult, VersionSpan
from silva.types.messages import Conversation, Message
from silva.types.rollout import ExportRecord, TrainingSample


def _grown() -> SessionForest:
    """Three linear turns, of which the second was sampled by two weight versions."""
    forest = SessionForest()
    conversation = Conversation(template_kwargs={"enable_thinking": False})
    digests: list[bytes] = []
    for turn in range(3):
        digests.append(b"user %d" % turn)
        spans = (VersionSpan(start=0, length=2, version=turn), VersionSpan(start=2, length=1, version=turn + turn % 2))
        result = GenerateResult(
            ids=[70 + turn, 71, 2],
            logprobs=[-0.3, -1.25, -0.001],
            kept_mass=[0.7, 1.0, 0.95],
            finish_reason="stop",
            version_spans=spans if turn % 2 else (VersionSpan(start=0, length=3, version=turn),),
        )
        placement = Placement(
            match=forest.match(conversation, list(digests)),
            messages=(Message(role="user", content=f"q {turn}"),),
            observation_ids=(10 + turn, 11),
            lead_ids=(1,),
        )
        answer = Message(role="assistant", content=f"a {turn}")
        digests.append(b"assistant %d" % turn)
        forest.commit(placement, Response(result=result, message=answer, digest=digests[-1]))
    return forest


def test_leaves_come_back_with_their_shared_turns_masked_once(tmp_path: Path) -> None:
    forest = _grown()
    match = forest.match(
        Conversation(template_kwargs={"enable_thinking": False}), [b"user 0", b"assistant 0", b"other"]
    )
    placement = Placement(
        match=match, messages=(Message(role="user", content="o"),), observation_ids=(12,), lead_ids=(1,)
    )
    result = GenerateResult(
        ids=[80, 2],
        logprobs=[-0.5, -0.25],
        kept_mass=[1.0, 1.0],
        finish_reason="stop",
        version_spans=(VersionSpan(start=0, length=2, version=7),),
    )
    forest.commit(placement, Response(result=result, message=Message(role="assistant", content="b"), digest=b"b"))
    leaves = exported_leaves(forest, "leaves")
    records = [ExportRecord(name=f"leaf-{at}", node_id=leaf.node_id, reward=1.0) for at, leaf in enumerate(leaves)]
    with RunLedger(tmp_path) as ledger:
        group = begin(ledger, 0)
        built = build_samples(forest, records, session_id=f"{group}-s0", group_id=group)
        ended = exported(f"{group}-s0", group, nodes=node_rows(forest), samples=list(built), requests=[])
        ledger.end_session(ended).result(5)
        with open_run(tmp_path) as conn:
            read = load_samples(conn, f"{group}-s0")
    for had, has in zip(built, read, strict=True):
        _assert_same(has, had)
    assert [sample.num_trainable for sample in built] == [9, 2]


def _assert_same(read: TrainingSample, built: TrainingSample) -> None:
    same = (
        *("token_ids", "loss_mask", "version_spans", "prompt_len", "num_turns", "reward", "metadata", "node_id"),
        "name",
    )
    assert [getattr(read, key) for key in same] == [getattr(built, key) for key in same]
    assert _float32(read.logprobs) == _float32(built.logprobs)
    assert _float32(read.kept_mass) == _float32(built.kept_mass)


def _float32(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def test_a_forest_comes_back_from_the_ledger(tmp_path: Path) -> None:
    forest = _grown()
    record = ExportRecord(name=None, node_id=linear_leaf(forest).node_id, reward=0.5, metadata={"k": 1})
    with RunLedger(tmp_path) as ledger:
        group = begin(ledger, 0)
        built = build_sample(forest, record, session_id=f"{group}-s0", group_id=group)
        ended = exported(f"{group}-s0", group, nodes=node_rows(forest), samples=[built], requests=[])
        ledger.end_session(ended).result(5)
        doc = show_session(tmp_path, f"{group}-s0")
        with open_run(tmp_path) as conn:
            (read,) = load_samples(conn, f"{group}-s0")
    _assert_same(read, built)
    assert [i for node in doc["nodes"] for i in node["token_ids"]] == built.token_ids
    assert doc["samples"][0]["logprobs"][3:6] == [-0.3, -1.25, -0.001]
