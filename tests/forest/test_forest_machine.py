"""Random branching histories against the forest, beside a reference that knows only messages and texts.

The reference keeps each generated turn as the test saw it (engine input, sampled ids, log-probs, versions) and finds
states in a dict of spelled-out histories. What the engine should have read is worked out as text: the last sampled
turn's own text, then a plain render of the messages since.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from char_codec import END, OTHER_END, CharCodec, assistant_text, ids_of, text_of, twin
from forest_reference import History, Pending, Reference, State, Turn, says_nothing, spell
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from restored import assert_same_forest, assert_same_matches, restored

from silva.forest.identity import canonical_arguments, chain_keys, message_digest, root_key
from silva.forest.lineage import build_sample, build_samples, exported_leaves, linear_leaf, node_rows
from silva.forest.node import Node
from silva.forest.placement import Match
from silva.forest.records import ToldHistories
from silva.forest.session_forest import SessionForest
from silva.parsers import TurnParser
from silva.turns.placing import place_turn
from silva.turns.reading import read_turn
from silva.types.errors import SessionFailure, TransitionRefused
from silva.types.generation import GenerateResult, append_span
from silva.types.messages import Conversation, Message, ToolCall
from silva.types.rollout import ExportRecord

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CONVERSATIONS = (
    Conversation(template_kwargs={}),
    Conversation(tools=(TOOL,), template_kwargs={}),
    Conversation(template_kwargs={"enable_thinking": False}),
)
PARSER = TurnParser.from_names(reasoning="generic", tool_call="generic")

words = st.sampled_from(["", "a", "b", "a b", "é🙂"])
users = words.map(lambda text: Message(role="user", content=text))
results = st.builds(Message, role=st.just("tool"), content=words, tool_call_id=st.sampled_from(["x", "y"]))
arguments = st.sampled_from(["{}", '{"a": 1.0}', '{"b":  [1], "a": 2}', '{"a": 1, "a": 2}', '{"a": '])
sampled_messages = st.builds(
    Message,
    role=st.just("assistant"),
    content=words,
    reasoning=st.sampled_from(["", "", "r", "r s"]),
    tool_calls=st.lists(st.builds(ToolCall, id=st.just(""), name=st.just("f"), arguments=arguments), max_size=2).map(
        tuple
    ),
)
version_lists = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=3)


class ForestMachine(RuleBasedStateMachine):
    codec = CharCodec()
    lenient = False

    def __init__(self) -> None:
        super().__init__()
        self.forest = SessionForest()
        self.reference = Reference()
        self.turns: list[Turn] = []
        self.pending: list[Pending] = []
        self.asked: list[tuple[Conversation, History]] = []
        self.num_sampled = 0

    # ---- requests: each rule makes one history

    @initialize(first=users)
    def start(self, first: Message) -> None:
        self.request(0, (first,))

    @rule(
        conversation=st.integers(0, len(CONVERSATIONS) - 1),
        system=st.booleans(),
        shots=st.lists(users | sampled_messages, max_size=2),
        last=users,
    )
    def fresh(self, conversation: int, system: bool, shots: list[Message], last: Message) -> None:
        head = (Message(role="system", content="s"),) if system else ()
        self.request(conversation, (*head, *shots, last))

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), tail=st.lists(users | results, max_size=3), spaced=st.booleans())
    def go_on(self, data: st.DataObject, tail: list[Message], spaced: bool) -> None:
        """The reply is echoed; without new messages the turn is continued where it was cut, else opened anew."""
        turn = data.draw(st.sampled_from(self.turns))
        history = self.echo(turn, joined=data.draw(st.booleans()), spaced=spaced)
        self.request(turn.conversation, (*history, *tail))

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), losses=st.integers(0, 255), tail=users, names=st.sampled_from(["n", "m"]))
    def lossy(self, data: st.DataObject, losses: int, tail: Message, names: str) -> None:
        """What a client sends back that trims or pads texts, drops thoughts or empty answers, and renames calls."""
        turn = data.draw(st.sampled_from(self.turns))
        history: list[Message] = []
        new: dict[str, str] = {}
        for index, message in enumerate(self.echo(turn, joined=losses % 3 == 0, spaced=False)):
            if message.role == "assistant" and losses >> index % 4 & 1:
                new = {call.id: f"{names}{at}" for at, call in enumerate(message.tool_calls) if losses & 32}
                calls = tuple(replace(call, id=new.get(call.id, call.id)) for call in message.tool_calls)
                content = f" {message.content}\n" if losses & 64 else message.content.strip()
                reasoning = message.reasoning if losses & 16 else ""
                message = replace(message, content=content, reasoning=reasoning, tool_calls=calls)
            elif message.tool_call_id in new:
                message = replace(message, tool_call_id=new[message.tool_call_id])
            if not (losses & 8 and says_nothing(message) and message.role == "assistant"):
                history.append(message)
        last = history[-1].tool_calls
        result = [Message(role="tool", content="r", tool_call_id=call.id) for call in last] if losses & 128 else []
        self.request(turn.conversation, (*history, *result, tail))

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(self.turns))
        self.request(turn.conversation, turn.request)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def same_request_beside_an_open_one(self, data: st.DataObject) -> None:
        open_one = data.draw(st.sampled_from(self.pending))
        self.request(open_one.conversation, open_one.request)

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), tail=st.lists(users | results, min_size=1, max_size=2))
    def ask_again_with_more(self, data: st.DataObject, tail: list[Message]) -> None:
        """User after user, a longer run of tool results: the committed observation goes on."""
        turn = data.draw(st.sampled_from(self.turns))
        self.request(turn.conversation, (*turn.request, *tail))

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), last=users)
    def rewrite(self, data: st.DataObject, last: Message) -> None:
        """One assistant message of the history is edited or shortened away."""
        turn = data.draw(st.sampled_from(self.turns))
        history = list(self.echo(turn, joined=True, spaced=False))
        index = data.draw(st.integers(0, len(history) - 1))
        if history[index].role == "assistant" and data.draw(st.booleans()):
            history[index] = replace(history[index], content=history[index].content + "!")
        else:
            del history[index + 1 :]
        if history[0].role == "system" and len(history) == 1:
            history.append(last)
        self.request(turn.conversation, tuple(history))

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), conversation=st.integers(0, len(CONVERSATIONS) - 1))
    def same_messages_other_tools(self, data: st.DataObject, conversation: int) -> None:
        turn = data.draw(st.sampled_from(self.turns))
        self.request(conversation, turn.request)

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), first=users)
    def refused(self, data: st.DataObject, first: Message) -> None:
        turn = data.draw(st.sampled_from(self.turns))
        history = (*self.echo(turn, joined=True, spaced=False), first, Message(role="system", content="late"))
        before = len(self.forest.nodes)
        match, between = self.match(turn.conversation, history)
        with pytest.raises(TransitionRefused) as caught:
            place_turn(self.codec, match, between)
        assert caught.value.field == f"messages[{len(history) - 1}].role"
        assert len(self.forest.nodes) == before

    def echo(self, turn: Turn, *, joined: bool, spaced: bool) -> History:
        """What a client sends back after a turn; with `spaced` it writes the arguments of calls its own way."""
        before, reply = turn.request, turn.reply
        if joined and turn.node.parent is not None and turn.above is not None and turn.above.cut and turn.is_continued:
            before, reply = turn.state.own[:-1], turn.state.own[-1]
        history = (*before, reply)
        return tuple(_spaced(message) for message in history) if spaced else history

    # ---- one turn, as the serving side does it

    def match(self, conversation: int, history: History) -> tuple[Match, Callable[[int, int], History]]:
        digests = [message_digest(m) for m in history]
        match = self.forest.match(CONVERSATIONS[conversation], digests, history.__getitem__, self.lenient)
        return match, lambda start, stop: history[start:stop]

    def request(self, conversation: int, history: History) -> None:
        base, length, own, repaired = self.reference.resolve(conversation, history, self.lenient)
        before = len(self.forest.nodes)
        self.asked.append((CONVERSATIONS[conversation], history))
        match, between = self.match(conversation, history)
        assert match.num_matched == length
        assert len(match.aliases) == len(repaired) and all(alias.repair.kinds for alias in match.aliases)
        renames = [dict(alias.repair.renames) for alias in match.aliases]
        assert renames == [names for _, _, names, _ in repaired]
        assert match.is_full == (length == len(history))
        if base is None:
            assert match.kind == "root"
        else:
            assert match.parent is not None and match.parent.kind == ("response" if base.is_turn else "observation")
            assert text_of(match.parent.path_ids()) == base.text
        placement = place_turn(self.codec, match, between)
        assert len(self.forest.nodes) == before
        continues = match.is_full and base is not None and base.is_turn and not base.closed
        assert placement.continues == continues
        text = base.text if continues and base is not None else self.expected_text(conversation, base, own)
        assert text_of(placement.input_ids()) == text
        self.pending.append(
            Pending(
                conversation=conversation,
                request=history,
                placement=placement,
                base=base,
                own=own,
                text=text,
                continues=continues,
                repaired=repaired,
            )
        )

    def expected_text(self, conversation: int, base: State | None, own: History) -> str:
        """The text of the last sampled turn, its end where the model wrote none, the messages since, the opening."""
        turn = base.turn if base is not None else None
        opening = "<|im_start|>assistant\n" + self.codec.prefill
        if turn is None:
            tools = "<|im_start|>system\ntools f<|im_end|>\n" if CONVERSATIONS[conversation].tools else ""
            return tools + self.render(own) + opening
        close = "" if turn.state.closed else "<|im_end|>"
        return turn.state.text + close + "\n" + self.render(own[len(turn.state.own) :]) + opening

    def render(self, messages: History) -> str:
        text, last = "", ""
        for message in messages:
            role = message.role
            body = assistant_text(message) if role == "assistant" else message.content
            body = f"<r>{body}</r>" if role == "tool" else body
            if role == last and (role == "tool" or (role == "user" and self.codec.join_users)):
                text = text.removesuffix("<|im_end|>\n") + ("&" if role == "user" else "") + body + "<|im_end|>\n"
            else:
                text += f"<|im_start|>{'user' if role == 'tool' else role}\n{body}<|im_end|>\n"
            last = role
        return text

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def generation_fails(self, data: st.DataObject) -> None:
        self.pending.remove(data.draw(st.sampled_from(self.pending)))

    @precondition(lambda self: self.pending)
    @rule(
        data=st.data(),
        message=sampled_messages,
        stop=st.sampled_from([END, OTHER_END]),
        twins=st.integers(0, 7),
        versions=version_lists,
    )
    def generation_stops(
        self, data: st.DataObject, message: Message, stop: int, twins: int, versions: list[tuple[int, int]]
    ) -> None:
        pending = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        self.commit(pending, [*self.sampled(pending, message, twins), stop], "stop", versions)

    @precondition(lambda self: self.pending)
    @rule(
        data=st.data(),
        message=sampled_messages,
        part=st.sampled_from([0.2, 0.5, 0.9, 1.0]),
        twins=st.integers(0, 7),
        versions=version_lists,
    )
    def generation_is_cut(
        self, data: st.DataObject, message: Message, part: float, twins: int, versions: list[tuple[int, int]]
    ) -> None:
        pending = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        ids = self.sampled(pending, message, twins) or ids_of("c")
        self.commit(pending, ids[: max(1, int(part * len(ids)))], "length", versions)

    def sampled(self, pending: Pending, message: Message, twins: int) -> list[int]:
        text = assistant_text(message, in_think=bool(self.codec.prefill) and not pending.continues)
        return [twin(i) if (twins >> index % 3) & 1 else i for index, i in enumerate(ids_of(text))]

    def commit(self, pending: Pending, ids: list[int], finish: str, versions: list[tuple[int, int]]) -> None:
        logprobs = [-float(self.num_sampled + index) for index in range(1, len(ids) + 1)]
        self.num_sampled += len(ids)
        by_id = [version for length, version in versions for _ in range(length)]
        by_id = [*by_id, *[versions[-1][1]] * len(ids)][: len(ids)]
        spans = ()
        for version in by_id:
            spans = append_span(spans, 1, version)
        result = GenerateResult(
            ids=ids, logprobs=logprobs, kept_mass=[0.5] * len(ids), finish_reason=finish, version_spans=spans
        )
        placement = pending.placement
        sibling = self.forest.next_sibling(placement.match.request_key)
        response, reply = read_turn(self.codec, PARSER, placement, result, sibling=sibling)
        request_id = f"q{len(self.turns)}"
        node = self.forest.commit(placement, replace(response, request_id=request_id))
        self.note(pending, node, reply, result, by_id, request_id)

    def note(
        self, pending: Pending, node: Node, reply: Message, result: GenerateResult, by_id: list[int], request_id: str
    ) -> None:
        self.reference.learn(pending.conversation, pending.repaired)
        base, whole = pending.base, node.messages[0]
        before = pending.own[:-1] if pending.continues else pending.own
        said = text_of(i for i in result.ids if i not in self.codec.stop_ids)
        if pending.continues and base is not None:
            said = base.said + said
        parsed = PARSER.parse(said, opening=self.codec.prefill)
        assert (whole.content, whole.reasoning) == (parsed.content, parsed.reasoning)
        assert [(c.name, c.arguments) for c in whole.tool_calls] == [(c.name, c.arguments) for c in parsed.calls]
        assert pending.continues or reply == whole
        state = State(
            own=(*before, whole),
            text=pending.text + text_of(result.ids),
            closed=result.finish_reason == "stop",
            turn=None,
            is_turn=True,
            said=said,
        )
        above = base.turn if base is not None else None
        turn = Turn(
            request_id=request_id,
            conversation=pending.conversation,
            request=pending.request,
            reply=reply,
            state=state,
            above=above,
            input_ids=pending.placement.input_ids(),
            sampled=result.ids,
            logprobs=result.logprobs,
            versions=by_id,
            cut=result.finish_reason == "length",
            node=node,
        )
        turn.is_continued = pending.continues
        state.turn = turn
        if not (base is not None and base.own == pending.own):
            self.note_observation(pending, above, node)
        self.turns.append(turn)
        self.reference.add(pending.conversation, state.own, state)
        self.reference.answered(pending.conversation, before, whole, state)
        if pending.continues:
            self.reference.add(pending.conversation, (*pending.own, reply), state, alias=True)
            self.reference.answered(pending.conversation, pending.own, reply, state)
        turn.run = (before, (reply,))
        if not pending.placement.messages and above is not None and base is above.state:
            start, told = above.run
            turn.run = (start, (*told, reply))
            joined = _joined(turn.run[1])
            if spell(joined) != spell(whole) and spell(reply) != spell(Message(role="assistant")):
                self.reference.add(pending.conversation, (*start, joined), state, alias=True)
                self.reference.answered(pending.conversation, start, joined, state)

    def note_observation(self, pending: Pending, above: Turn | None, node: Node) -> None:
        assert node.parent is not None and node.parent.kind == "observation"
        opening = "<|im_start|>assistant\n" + self.codec.prefill
        text = pending.text.removesuffix(opening)
        assert text_of(node.parent.path_ids()) == text
        if node.parent.children == [node]:
            state = State(own=pending.own, text=text, closed=True, turn=above, is_turn=False)
            self.reference.add(pending.conversation, pending.own, state)

    # ---- what holds at all times

    @precondition(lambda self: self.turns)
    @invariant()
    def newest_lineage_is_exact(self) -> None:
        self.check_lineage(self.turns[-1])

    def check_lineage(self, turn: Turn) -> None:
        sample = build_sample(
            self.forest, ExportRecord(name=None, node_id=turn.node.node_id, reward=None), session_id="s", group_id="g"
        )
        num = len(sample.token_ids)
        assert num == len(sample.loss_mask) == len(sample.logprobs) == sum(s.length for s in sample.version_spans)
        mask, logprobs, versions = [0] * num, [0.0] * num, [-1] * num
        lineage = turn.lineage()
        for step in lineage:
            start = len(step.input_ids)
            stop = start + len(step.sampled)
            assert sample.token_ids[:start] == step.input_ids
            assert sample.token_ids[start:stop] == step.sampled
            mask[start:stop] = [1] * len(step.sampled)
            logprobs[start:stop] = step.logprobs
            versions[start:stop] = step.versions
        assert sample.loss_mask == mask
        assert sample.logprobs == logprobs
        assert sample.kept_mass == [0.5 if bit else 1.0 for bit in mask]
        assert [s.version for s in sample.version_spans for _ in range(s.length)] == versions
        assert all(a.version != b.version for a, b in zip(sample.version_spans, sample.version_spans[1:], strict=False))
        assert sample.prompt_len == len(lineage[0].input_ids)
        assert sample.num_turns == len(lineage)
        assert sample.truncated == turn.cut
        assert text_of(sample.token_ids) == turn.state.text

    def check_records(self) -> None:
        """The history of each turn, in its client's own words, is a record of exactly that turn."""
        told = ToldHistories(self.forest.nodes)
        for turn in self.turns:
            for history in ((*turn.request, turn.reply), turn.state.own):
                root = root_key(CONVERSATIONS[turn.conversation])
                digests = [message_digest(message) for message in history]
                found = told.find(root, digests, history.__getitem__, lenient=self.lenient)
                assert turn.node in [candidate.node for candidate in found.candidates]
                assert history != turn.state.own or not all(candidate.kinds for candidate in found.candidates)

    @invariant()
    def leaves_train_every_sampled_id_once(self) -> None:
        if not self.turns:
            return
        leaves = exported_leaves(self.forest, "leaves")
        records = [ExportRecord(name=f"leaf-{at}", node_id=leaf.node_id, reward=None) for at, leaf in enumerate(leaves)]
        seen: set[int] = set()
        trained: list[float] = []
        for sample, leaf in zip(build_samples(self.forest, records, session_id="s", group_id="g"), leaves, strict=True):
            own = [logprob for logprob, bit in zip(sample.logprobs, sample.loss_mask, strict=True) if bit]
            new = [node for node in leaf.path() if node.kind == "response" and node.node_id not in seen]
            assert own == [logprob for node in new for logprob in node.logprobs]
            assert sample.token_ids == leaf.path_ids().tolist()
            seen.update(node.node_id for node in new)
            trained += own
        assert sorted(trained, reverse=True) == [-float(i) for i in range(1, self.num_sampled + 1)]
        assert exported_leaves(self.forest, "last") == [self.turns[-1].node] and self.turns[-1].node in leaves

    @invariant()
    def export_is_linear_or_refused(self) -> None:
        if not self.turns:
            with pytest.raises(SessionFailure) as caught:
                linear_leaf(self.forest)
            assert caught.value.reason == "no_response"
            return
        ends = [turn for turn in self.turns if len(turn.lineage()) == len(self.turns)]
        if ends:
            leaf = linear_leaf(self.forest)
            assert leaf is ends[0].node
            record = ExportRecord(name=None, node_id=leaf.node_id, reward=None)
            sample = build_sample(self.forest, record, session_id="s", group_id="g")
            trained = [x for x, bit in zip(sample.logprobs, sample.loss_mask, strict=True) if bit]
            assert trained == [-float(i) for i in range(1, self.num_sampled + 1)]
            return
        with pytest.raises(SessionFailure) as caught:
            linear_leaf(self.forest)
        assert caught.value.reason == "not_linear"
        inner = {id(turn.above) for turn in self.turns}
        leaves = [turn for turn in self.turns if id(turn) not in inner]
        for turn in leaves[:8]:
            assert f"request {turn.request_id})" in str(caught.value)

    @invariant()
    def keys_are_chained(self) -> None:
        keyed = [(turn.node, turn.state.own, turn.conversation) for turn in self.turns[-3:]]
        for node, own, conversation in keyed:
            root = root_key(CONVERSATIONS[conversation])
            assert node.key == chain_keys(root, [message_digest(m) for m in own])[-1]
            assert node.path()[0].key == root

    @invariant()
    def replies_carry_ids_of_their_own(self) -> None:
        for turn in self.turns[-1:]:
            held = {call.id for other in self.turns[:-1] for call in other.node.messages[0].tool_calls}
            inherited = {call.id for call in turn.above.state.own[-1].tool_calls} if turn.is_continued else set()
            ids = [call.id for call in turn.node.messages[0].tool_calls]
            assert len(set(ids)) == len(ids)
            assert not (set(ids) - inherited) & held

    def teardown(self) -> None:
        self.check_records()
        nodes, records = self.forest.nodes, node_rows(self.forest)
        assert [node.node_id for node in nodes] == list(range(len(nodes)))
        for node, record in zip(nodes, records, strict=True):
            assert record.node_id == node.node_id
            assert record.state_key == node.key.hex()
            assert (record.parent_id is None) == (node.kind == "root")
            assert record.parent_id is None or record.parent_id < record.node_id
            assert len(record.token_ids) == len(record.loss_mask) == len(record.logprobs) == len(record.kept_mass)
            assert sum(span.length for span in record.version_spans) == len(record.token_ids)
            joined = [i for step in node.path() for i in records[step.node_id].token_ids]
            assert joined == node.path_ids().tolist() and len(joined) == node.num_tokens
        roots = {turn.conversation for turn in self.turns}
        assert sum(node.kind == "root" for node in nodes) == len(roots)
        assert sum(node.kind == "response" for node in nodes) == len(self.turns)
        assert all(
            node.kind != "observation" or any(child.kind == "response" for child in node.children) for node in nodes
        )
        for turn in self.turns:
            self.check_lineage(turn)
        again = restored(self.forest)
        assert_same_forest(again, self.forest)
        assert_same_matches(again, self.forest, self.asked)


def _spaced(message: Message) -> Message:
    calls = tuple(replace(call, arguments=_rewritten(call.arguments)) for call in message.tool_calls)
    return replace(message, tool_calls=calls)


def _joined(told: History) -> Message:
    return Message(
        role="assistant",
        content="".join(part.content for part in told),
        reasoning="".join(part.reasoning for part in told),
        tool_calls=tuple(call for part in told for call in part.tool_calls),
    )


def _rewritten(raw: str) -> str:
    """Arguments as a client writes them after reading, where reading loses nothing."""
    if canonical_arguments(raw).startswith("raw:"):
        return raw
    return json.dumps(json.loads(raw), separators=(" ,", " : "), sort_keys=True)


class JoiningMachine(ForestMachine):
    """A template that joins user turns, and starts each turn inside a reasoning block."""

    codec = CharCodec(join_users=True, prefill="<think>\n")


class LenientMachine(ForestMachine):
    """The same histories where lossy echoes are the turns that they were."""

    lenient = True


SETTINGS = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestForest = ForestMachine.TestCase
TestForest.settings = SETTINGS
TestJoiningForest = JoiningMachine.TestCase
TestJoiningForest.settings = SETTINGS
TestLenientForest = LenientMachine.TestCase
TestLenientForest.settings = SETTINGS
