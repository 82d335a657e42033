"""A forest that was stored and read again, beside the one that was stored."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from silva.forest.identity import message_digest
from silva.forest.lineage import node_rows
from silva.forest.node import Node
from silva.forest.placement import Match
from silva.forest.restore import restore_forest
from silva.forest.session_forest import SessionForest
from silva.types.messages import Conversation, Message


def restored(forest: SessionForest) -> SessionForest:
    """The forest by way of its records, their JSON parts as text."""
    records = [
        replace(
            record,
            **{
                name: json.loads(json.dumps(getattr(record, name)))
                for name in ("messages", "tools", "template_kwargs", "told", "spellings")
            },
        )
        for record in node_rows(forest)
    ]
    requests = {node.node_id: node.request_id for node in forest.nodes if node.kind == "response" and node.request_id}
    return restore_forest(records, requests)


def assert_same_forest(mine: SessionForest, other: SessionForest) -> None:
    """Same nodes, field by field, and the same records."""
    assert list(map(_told, mine.nodes)) == list(map(_told, other.nodes))
    assert list(map(asdict, node_rows(mine))) == list(map(asdict, node_rows(other)))


def assert_same_matches(mine: SessionForest, other: SessionForest, asked: Sequence[tuple[Conversation, Any]]) -> None:
    """Histories lead to the same places in both, read strictly and leniently; so do their beginnings."""
    for conversation, history in asked:
        for end in {len(history), max(1, len(history) - 1)}:
            messages: tuple[Message, ...] = history[:end]
            digests = [message_digest(message) for message in messages]
            for lenient in (False, True):
                found = [
                    _place(forest.match(conversation, digests, messages.__getitem__, lenient), forest)
                    for forest in (mine, other)
                ]
                assert found[0] == found[1], messages


def _place(match: Match, forest: SessionForest) -> tuple[object, ...]:
    return (
        match.conversation,
        match.root,
        match.request_key,
        match.num_matched,
        None if match.parent is None else match.parent.node_id,
        [(alias.key, alias.node.node_id, alias.repair, alias.beyond) for alias in match.aliases],
        list(match.result_ids),
        match.kind,
        forest.next_sibling(match.request_key),
    )


def _told(node: Node) -> tuple[object, ...]:
    return (
        node.node_id,
        node.parent and node.parent.node_id,
        node.key,
        node.kind,
        node.messages,
        node.conversation,
        node.ids,
        node.lead,
        node.num_tokens,
        node.num_images,
        node.request_id,
        struct.pack(f"{len(node.logprobs)}f", *node.logprobs),
        node.kept_mass,
        node.spans,
        node.finish,
        node.num_aborts,
        [child.node_id for child in node.children],
        node.before,
        node.told,
    )
