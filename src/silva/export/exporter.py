"""From an agent's output to the contexts that its session exports."""

from __future__ import annotations

import logging
import threading
from collections import Counter

import msgspec

from silva.credit import Reward, read_reward
from silva.export.options import ExportOptions
from silva.forest import (
    Candidate,
    Canonicaliser,
    Choice,
    Node,
    RecordHistory,
    SessionForest,
    ToldHistories,
    choose,
    exported_leaves,
    root_key,
    why_unmatched,
)
from silva.types import ExportRecord, JsonObject, Mode, RequestError, SessionFailure, shown
from silva.wire import (
    HistoryCache,
    OutputDocument,
    OutputRecord,
    RequestImages,
    parse_output,
    project_message,
    read_conversation,
    read_list,
    read_value,
    record_invalid,
)

log = logging.getLogger("silva.rollout")

NO_RESPONSE = "no_response"
"""The ledger's word for a session without an answer of the model."""
RECORD_UNMATCHED = "record_unmatched"
"""The ledger's word for a session with a record that leads to no committed state."""
CONTEXTS_TOO_LARGE = "contexts_too_large"
"""The ledger's word for a session whose contexts have more tokens than one session may keep in memory."""
MAX_CONTEXT_TOKENS = 1 << 25
"""Tokens of all contexts of a session together (as samples they share few of them): about 1 GB."""
_RESPONSES_ITEMS = ("function_call", "function_call_output", "reasoning", "item_reference", "custom_tool_call")
_ANTHROPIC_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking")
_TOP_LEVEL_TEXTS = ("system", "instructions", "input")


class Exporter:
    """Consumes a session's forest and its raw output; produces its contexts. Safe to use from several threads."""

    def __init__(self, options: ExportOptions | None = None):
        """`options` must match requests as the turn service did; None takes the defaults."""
        self._options = options or ExportOptions()
        self._clean = Canonicaliser(self._options.profiles)
        self._lock = threading.Lock()
        self.counters: Counter[str] = Counter()
        """Over all records: `repair_<kind>`, `ambiguous` (several states fitted), `same_state` (one taken twice),
        `unanswered_end` (the last answer is left out)."""

    def records(
        self, forest: SessionForest, output: bytes | OutputDocument, mode: Mode, where: str
    ) -> list[ExportRecord]:
        """The contexts that an output names, in its order, or those of a session without names.

        `where` names the session in errors. Takes as long as reading 64 MB does. Raises SessionFailure:
        `output_invalid`, `metadata_invalid`, `reward_invalid`, `record_invalid`, `record_unmatched`, `no_response`,
        `not_linear`, `contexts_too_large`.
        """
        document = parse_output(output) if isinstance(output, bytes) else output
        if not any(node.kind == "response" for node in forest.nodes):
            names = ", ".join(record.where for record in document.records[:4])
            text = f"{names}: no record can be matched; " if names else ""
            raise SessionFailure(NO_RESPONSE, f"{text}the agent ended without an answer of the model")
        key = self._options.reward_key_of(mode)
        if document.records:
            records = self._explicit(forest, document.records, key, where)
        else:
            records = self._implicit(forest, document, key, where)
        num_tokens = sum(forest.nodes[record.node_id].num_tokens for record in records)
        if num_tokens > MAX_CONTEXT_TOKENS:
            raise SessionFailure(
                CONTEXTS_TOO_LARGE,
                f"{where} exports {len(records)} contexts of {num_tokens} tokens together; at most "
                f"{MAX_CONTEXT_TOKENS} are taken. Export the last state of each conversation, not those on the way",
            )
        return records

    def _implicit(
        self, forest: SessionForest, document: OutputDocument, key: str | None, where: str
    ) -> list[ExportRecord]:
        mode, reward = self._options.agentic_export, read_reward(document.reward, where, key)
        leaves = exported_leaves(forest, mode)
        names = [f"leaf-{number}" if mode == "leaves" else None for number in range(len(leaves))]
        return [_export(name, leaf, reward, document.metadata) for name, leaf in zip(names, leaves, strict=True)]

    def _explicit(
        self, forest: SessionForest, records: tuple[OutputRecord, ...], key: str | None, where: str
    ) -> list[ExportRecord]:
        rewards = [read_reward(record.reward, f"{where}, {record.where}", key) for record in records]
        told = ToldHistories(forest.nodes, lambda first: self._clean.clean(first)[0])
        cache = HistoryCache()
        choices = choose([self._candidates(told, record, cache) for record in records])
        for record, choice in zip(records, choices, strict=True):
            self._note(record, choice, where)
        return [
            _export(record.name, choice.node, reward, record.metadata)
            for record, choice, reward in zip(records, choices, rewards, strict=True)
        ]

    def _candidates(self, told: ToldHistories, record: OutputRecord, cache: HistoryCache) -> tuple[Candidate, ...]:
        history, skipped = _history(record, cache)
        lenient = self._options.lenient
        search = told.find(root_key(history.conversation), history.digests, history.message_at, lenient=lenient)
        if search.candidates:
            return search.candidates
        why = why_unmatched(told, history, search, lenient=lenient)
        raise SessionFailure(
            RECORD_UNMATCHED, f"{record.where} matches no committed state: {why}{_more_hints(record, skipped)}"
        )

    def _note(self, record: OutputRecord, choice: Choice, where: str) -> None:
        """Count the repairs, and warn where a record could also have meant another state."""
        counts = [f"repair_{kind}" for kind in choice.kinds]
        name, taken = f"{where}: {record.where}", f"{choice.node.kind} {choice.node.node_id}"
        if choice.rivals:
            counts.append("ambiguous")
            others = ", ".join(f"{node.kind} {node.node_id}" for node in choice.rivals[:8])
            log.warning("%s fits %s states: taken is %s, not %s", name, len(choice.rivals) + 1, taken, others)
        if choice.node.kind == "observation":
            counts.append("unanswered_end")
            if not self.counters["unanswered_end"]:
                text = "%s ends with a request (%s), and its answer is not trained; should it be, append that answer"
                log.warning(f"{text}. Said once a run: the metric export/unanswered_end counts them", name, taken)
        if choice.shared:
            counts.append("same_state")
            log.warning("%s is the same state as another record: %s", name, taken)
        with self._lock:
            self.counters.update(counts)


def _export(name: str | None, node: Node, reward: Reward, metadata: JsonObject) -> ExportRecord:
    return ExportRecord(name=name, node_id=node.node_id, reward=reward.value, helpers=reward.helpers, metadata=metadata)


def _history(record: OutputRecord, cache: HistoryCache) -> tuple[RecordHistory, tuple[str, ...]]:
    """A record's history, read as a Chat request would be, and its tools that are no functions."""
    try:
        conversation, skipped = read_conversation(record.fields, cache)
        root_key(conversation)
        raws = read_list(record.fields["messages"], "messages")
    except RequestError as error:
        record_invalid(record.where, str(error))
    images = RequestImages()

    def project(index: int):
        try:
            return project_message(raws[index], f"messages[{index}]", images)
        except RequestError as error:
            record_invalid(record.where, f"{error}{_shape_hint(raws[index])}")

    digests, between = cache.read(len(raws), lambda index: cache.key(raws[index]), project)
    history = RecordHistory(
        conversation=conversation, digests=digests, message_at=lambda index: between(index, index + 1)[0]
    )
    return history, skipped


def _shape_hint(raw: msgspec.Raw) -> str:
    """A hint for a message that belongs to another protocol than Chat."""
    try:
        value = read_value(raw, "messages")
    except RequestError:
        return ""
    if not isinstance(value, dict):
        return ""
    if "role" not in value and value.get("type") in _RESPONSES_ITEMS:
        what = f"It is an input item of the Responses API ({shown(value['type'])})"
    elif isinstance(content := value.get("content"), list) and any(
        isinstance(part, dict) and part.get("type") in _ANTHROPIC_BLOCKS for part in content
    ):
        what = "It is made of blocks of the Anthropic Messages API"
    else:
        return ""
    return (
        f". {what}; records hold Chat messages whatever protocol the agent speaks: a call is an entry of `tool_calls` "
        "of an assistant message, its result a message of role tool"
    )


def _more_hints(record: OutputRecord, skipped: tuple[str, ...]) -> str:
    """A hint at parts of the record that have no meaning and may be the reason."""
    hints = [
        f". The record's key `{name}` means nothing: such a text belongs into `messages`"
        for name in _TOP_LEVEL_TEXTS
        if name in record.ignored
    ]
    if skipped:
        hints.append(
            f". Of its tools, those that are no nested function tools mean nothing: {', '.join(skipped[:4])}; write "
            '{"type": "function", "function": {"name": ..., "parameters": ...}}'
        )
    return "".join(hints)
