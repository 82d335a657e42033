"""Sessions of the real gateway, written to a ledger and read back: forests that answer like those that were served."""

from __future__ import annotations

import asyncio
import copy
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import messages_client
import pytest
from gateway_serve import Json, Serve, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from restored import assert_same_forest, assert_same_matches

from silva.codec import TurnCodec
from silva.forest.lineage import build_samples, exported_leaves
from silva.forest.restore import restore_forest
from silva.forest.session_forest import SessionForest
from silva.judge.group_end import Outcome
from silva.rollout.group_runner import session_record
from silva.store.ledger import RunLedger
from silva.store.queries import open_run
from silva.store.stored import load_session
from silva.turns.session import Session
from silva.types.messages import Conversation
from silva.types.rollout import ExportRecord

SCRIPT: list[Json] = [
    {"text": "<think>\nwhy\n</think>\n\n  Look. "},
    {"text": '<tool_call>\n{"name": "f", "arguments": {"a": 1.0}}\n</tool_call>'},
    {"text": '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>', "finish_reason": "length"},
    {"text": "well"},
    {"text": " well ", "finish_reason": "length"},
    {"text": "", "logprobs": [-0.25]},
    {"text": "so <think>no</think>", "finish_reason": "length"},
]
TOOL: Json = {"name": "f", "parameters": {"type": "object", "properties": {"n": {"maximum": 1.5}}}}
NOISE = "x-anthropic-billing-header: cc_version=2.1.{}; cc_entrypoint=cli; cch={};\nYou help."


@dataclass(kw_only=True)
class _Turn:
    """A request that was answered, and the history with its answer."""

    path: str
    fields: Json
    messages: list[Json] = field(default_factory=list[Json])


steps = st.tuples(
    st.sampled_from(["new", "go_on", "go_on", "go_on", "again", "continue"]),
    st.integers(0, 7),
    st.sampled_from(["chat", "messages"]),
    st.sampled_from(["", "strip", "forget", "rename", "drop"]),
)


@pytest.mark.slow
@settings(max_examples=2)
@given(st.lists(st.lists(steps, min_size=3, max_size=9), min_size=4, max_size=6))
def test_a_stored_session_is_the_one_that_was_served(codec: TurnCodec, plans: list[Any]) -> None:
    asyncio.run(_serve_and_read(codec, plans))


async def _serve_and_read(codec: TurnCodec, plans: list[Any]) -> None:
    asked: list[tuple[Conversation, Any]] = []
    match = SessionForest.match

    def spy(forest: SessionForest, conversation: Conversation, digests: Any, message_at: Any = None, *more: Any):
        asked.append((conversation, tuple(map(message_at, range(len(digests))))))
        return match(forest, conversation, digests, message_at, *more)

    async with serving(codec, SCRIPT) as serve:
        for number, plan in enumerate(plans):
            asked.clear()
            with patch.object(SessionForest, "match", spy):
                await _talk(serve, f"s{number}", plan)
            served = serve.session(f"s{number}")
            again = _stored(served)
            assert_same_forest(again, served.forest)
            assert_same_matches(again, served.forest, asked)
            assert _samples(again) == _samples(served.forest)


async def _talk(serve: Serve, session_id: str, plan: list[Any]) -> None:
    turns: list[_Turn] = []
    for number, (kind, which, protocol, loss) in enumerate(plan):
        if kind == "new" or not turns:
            tool = TOOL if protocol == "chat" else {"name": "f", "input_schema": TOOL["parameters"]}
            tools = [{"type": "function", "function": tool}] if protocol == "chat" else [tool]
            system = NOISE.format(which, number)
            messages: list[Json] = [{"role": "user", "content": f"q{which % 2}"}]
            turn = _Turn(path=protocol, fields={"tools": tools} if which % 3 else {}, messages=messages)
            if which > 3 and protocol == "chat":
                messages.insert(0, {"role": "system", "content": system})
            elif which > 3:
                turn.fields["system"] = system
        else:
            turn = copy.deepcopy(turns[which % len(turns)])
            if kind == "again":
                turn.messages.pop()
            else:
                _lose(turn, loss)
            if kind == "go_on":
                turn.messages += _results(turn)
                turn.messages.append({"role": "user", "content": "more"})
        body = {"messages": turn.messages, **turn.fields}
        if turn.path == "chat":
            given = await serve.post(session_id, {"model": "m", **body})
        else:
            given = await messages_client.post(serve, session_id, body.pop("messages"), **body)
        if given.status_code == 200:
            document = given.json()
            if turn.path == "chat":
                said = document["choices"][0]["message"]
            else:
                said = {"role": "assistant", "content": document["content"]}
            turns.append(_Turn(path=turn.path, fields=turn.fields, messages=[*turn.messages, said]))


def _lose(turn: _Turn, loss: str) -> None:
    """What a client makes of the last answer before it sends it back."""
    said = turn.messages[-1]
    if loss == "drop" and not said["content"] and not said.get("tool_calls"):
        turn.messages.pop()
    elif turn.path == "chat":
        if loss == "strip" and said["content"]:
            said["content"] = said["content"].strip()
        if loss == "forget":
            said.pop("reasoning_content", None)
        for index, call in enumerate(said.get("tool_calls") or ()):
            call["id"] = f"mine{index}" if loss == "rename" else call["id"]
    else:
        for block in said["content"]:
            if loss == "strip" and block["type"] == "text":
                block["text"] = block["text"].strip() or "."
            if loss == "rename" and block["type"] == "tool_use":
                block["id"] = "mine"
        if loss == "forget":
            said["content"] = [block for block in said["content"] if block["type"] != "thinking"] or "."


def _results(turn: _Turn) -> list[Json]:
    said = turn.messages[-1]
    if turn.path == "chat":
        calls = said.get("tool_calls") or () if said["role"] == "assistant" else ()
        return [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in calls]
    blocks = said["content"] if said["role"] == "assistant" and isinstance(said["content"], list) else []
    results = [
        {"type": "tool_result", "tool_use_id": b["id"], "content": "r"} for b in blocks if b["type"] == "tool_use"
    ]
    return [{"role": "user", "content": results}] if results else []


def _stored(session: Session) -> SessionForest:
    with tempfile.TemporaryDirectory(prefix="silva-stored-") as folder, RunLedger(Path(folder)) as ledger:
        ledger.issue_prompt("p", dataset="d", epoch=0, row=0, position=0, content={"metadata": {"n": 1}, "label": [2]})
        ledger.start_group(session.group_id, prompt_id="p", n=1, start_step=0)
        ledger.start_session(session.session_id, group_id=session.group_id, slot=0)
        session.output = b'{"reward": 1}'
        ledger.end_session(session_record(session, Outcome(status="failed", reason="not_linear"))).result(30)
        with open_run(folder) as conn:
            stored = load_session(conn, session.session_id)
    assert (stored.output, stored.label) == (session.output, [2])
    assert stored.input is not None and stored.input.to_json() == {"metadata": {"n": 1}}
    assert [request.request_id for request in stored.requests] == [one.request_id for one in session.requests]
    return restore_forest(stored.nodes, stored.request_ids())


def _samples(forest: SessionForest) -> Any:
    leaves = exported_leaves(forest, "leaves")
    records = [ExportRecord(name=f"leaf-{at}", node_id=leaf.node_id, reward=1.0) for at, leaf in enumerate(leaves)]
    return build_samples(forest, records, session_id="s", group_id="g")
