"""Messages and damaged records on their way back into a forest."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.forest.identity import message_digest
from silva.forest.lineage import node_rows
from silva.forest.placement import Placement, Response
from silva.forest.restore import message_from_chat, restore_forest
from silva.forest.session_forest import SessionForest
from silva.types.generation import GenerateResult, VersionSpan
from silva.types.messages import Conversation, Image, Message, ToolCall, join_texts, text_of

texts = st.text(max_size=4)
images = st.sampled_from(
    [
        Image(digest="ab" * 32),
        Image(digest="f46ef168efa5b27403a5b4facc15e0c3eb92857f93caebdf2545a6e8440e5bf5", url="data.png"),
    ]
)
parts = st.lists(texts | images, max_size=4).map(join_texts)
calls = st.builds(ToolCall, id=texts, name=texts, arguments=texts)
messages = st.one_of(
    st.builds(Message, role=st.sampled_from(["system", "user"]), content=texts),
    st.builds(lambda parts: Message(role="user", content=text_of(parts), parts=parts), parts),
    st.builds(
        Message,
        role=st.just("assistant"),
        content=texts,
        reasoning=texts,
        tool_calls=st.lists(calls, max_size=2).map(tuple),
    ),
    st.builds(Message, role=st.just("tool"), content=texts, tool_call_id=st.none() | texts),
)


@settings(max_examples=60)
@given(messages)
def test_messages_come_back_from_their_chat_form(message: Message) -> None:
    assert message_from_chat(json.loads(json.dumps(message.to_chat()))) == message


def test_an_image_of_the_web_has_the_digest_of_its_address() -> None:
    url = "https://example.org/a.png"
    chat: Any = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    (image,) = message_from_chat(chat).images
    assert image.url == url and image.digest == "077c887d094368c955d80cb3562e2e0284d1355693196dfdd87e42854ac81349"


def _forest() -> SessionForest:
    forest = SessionForest()
    question, answer = Message(role="user", content="q"), Message(role="assistant", content="a")
    match = forest.match(Conversation(template_kwargs={}), [message_digest(question)])
    result = GenerateResult(
        ids=[7, 2],
        logprobs=[-0.5, -0.25],
        kept_mass=[1.0, 1.0],
        finish_reason="stop",
        version_spans=(VersionSpan(start=0, length=2, version=3),),
    )
    placement = Placement(match=match, messages=(question,), observation_ids=(5, 6), lead_ids=(1,))
    forest.commit(placement, Response(result=result, message=answer, digest=message_digest(answer)))
    return forest


DAMAGE: dict[str, tuple[int, dict[str, Any]]] = {
    "parent that does not exist": (2, {"parent_id": 5}),
    "no parent": (1, {"parent_id": None}),
    "wrong id": (2, {"node_id": 4}),
    "key that is none": (2, {"state_key": "xyz"}),
    "two answers": (2, {"messages": [{"role": "assistant", "content": "a"}] * 2}),
    "message without a role": (1, {"messages": [{"content": "q"}]}),
    "mask too short": (2, {"loss_mask": [0]}),
    "spelling of nothing": (2, {"spellings": [{"key": "00", "node_id": 9, "beyond": None, "renames": {}}]}),
    "call without a function": (2, {"told": {"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]}}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_records_name_their_node(damage: str) -> None:
    node_id, fields = DAMAGE[damage]
    records = node_rows(_forest())
    records[node_id] = replace(records[node_id], **fields)
    with pytest.raises(ValueError, match=f"node {records[node_id].node_id} is damaged: "):
        restore_forest(records)
