"""The text view of `silva show`: a run or one session, for people. Plain text that cannot drive the terminal."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence

from silva.store import ContextDoc, LedgerCounts, NodeDoc, RequestDoc, RunDoc, SessionDoc
from silva.types import JsonObject

Decode = Callable[[list[int]], str]

_MAX_CHARS = 1200
_HEAD_TOKENS, _TAIL_TOKENS = 8, 4
_MAX_SESSIONS = 200
_MAX_CONTEXTS = 100
_SLACK_CHARS = 100


def render_run(doc: RunDoc, *, full: bool = False) -> str:
    """The text of a `silva show RUN` document: counts with reasons, one line a session (the last 200 unless `full`),
    and of each reason for which sessions failed the first error.
    """
    lines = [f"run {printable(doc['run'])}", ""]
    outer = doc["counts"]
    for title, part in (("", outer), ("eval ", outer["eval"])):
        for key in ("prompts", "sessions"):
            if states := part[key]:
                lines.append(f"{title}{key}: {_counts_text(states)}")
    lines.append(f"groups: {len(doc['groups'])}")
    sessions = doc["sessions"] if full else doc["sessions"][-_MAX_SESSIONS:]
    if not sessions:
        return "\n".join([*lines, "no sessions yet"]) + "\n"
    lines.append("")
    rows = [("session", "group", "mode", "status", "reward", "reason")]
    rows += [
        (
            printable(session["session_id"]),
            printable(session["group_id"]),
            session["mode"],
            session["status"],
            _number(session["reward"]),
            printable(session["reason"] or ""),
        )
        for session in sessions
    ]
    lines += _table(rows)
    if len(sessions) < len(doc["sessions"]):
        lines.append(f"({len(doc['sessions']) - len(sessions)} earlier sessions are not listed; --full lists all)")
    for failure in doc["failures"]:
        lines += ["", f"the first {printable(failure['reason'] or '')}: session {printable(failure['session_id'])}"]
        lines += block(failure["error"] or "", full, keep_end=True)
    if _has_group_ends(outer):
        lines += ["", "why groups were dropped or filtered: the lines 'silva.rollout: group ...' of run.log"]
    return "\n".join(lines) + "\n"


def _has_group_ends(counts: LedgerCounts) -> bool:
    """Whether a prompt ended for a reason that none of its sessions carries."""
    states = counts["prompts"]
    return any(
        reason.startswith(("custom_advantage", "group_reward"))
        for state in ("dropped", "filtered")
        for reason in states.get(state, {})
    )


def render_session(doc: SessionDoc, decode: Decode | None = None, *, full: bool = False) -> str:
    """The text of a `silva show RUN SESSION` document.

    Each node: its place, texts by role, then its tokens as a table of id, mask, log-prob and weight version, with the
    text of each token where `decode` (ids to text) is given. Long texts and token runs are shortened unless `full`.
    """
    head = f"session {printable(doc['session_id'])}  group {printable(doc['group_id'])}  {doc['mode']}  {doc['status']}"
    lines = [head + (f" ({printable(doc['reason'])})" if doc["reason"] else "") + f"  reward {_number(doc['reward'])}"]
    if doc["metadata"]:
        lines.append(f"metadata {_shorten(printable(json.dumps(doc['metadata'], ensure_ascii=False)), full)}")
    if doc["error"]:
        lines += ["error", *block(doc["error"], full, keep_end=True)]
    if doc["status"] == "running":
        lines.append("still running: turns are written when the session ends")
    depths: dict[int, int] = {}
    for node in doc["nodes"]:
        depths[node["node_id"]] = depths.get(above(node), 0) + len(node["token_ids"])
        lines += ["", *_node(node, depths[node["node_id"]], decode, full)]
    if doc["requests"]:
        lines += ["", "requests", *_table(_request_rows(doc["requests"]))]
        lines += list(_differences(doc["requests"]))
        ignored = [f"{printable(name)} {number}" for name, number in doc["ignored_fields"].items()]
        if ignored:
            lines.append(f"  ignored fields, by requests: {', '.join(ignored)}")
    if doc["contexts"]:
        lines += ["", *_contexts(doc, full)]
    return "\n".join(lines) + "\n"


def above(node: NodeDoc) -> int:
    """The id of the node before it; -1 for a root."""
    return -1 if node["parent_id"] is None else node["parent_id"]


def printable(text: str) -> str:
    """`text` on one line, with control, formatting and unpaired characters as escapes."""
    return "".join(char if char == " " or not _unsafe(char) else _escape(char) for char in text)


def value_text(value: object) -> str:
    """One side of a difference, as JSON on one line."""
    return "(absent)" if value is None else printable(json.dumps(value, ensure_ascii=False))


def _unsafe(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def _counts_text(states: dict[str, dict[str, int]]) -> str:
    parts: list[str] = []
    for state, reasons in states.items():
        named = [f"{printable(reason)} {number}" for reason, number in reasons.items() if reason != "none"]
        parts.append(f"{state} {sum(reasons.values())}" + (f" ({', '.join(named)})" if named else ""))
    return ", ".join(parts)


def _node(node: NodeDoc, depth: int, decode: Decode | None, full: bool) -> Iterator[str]:
    above = "" if node["parent_id"] is None else f" after {node['parent_id']}"
    facts = [f"node {node['node_id']}{above}", node["kind"], f"{len(node['token_ids'])} tokens, {depth} from the start"]
    if node["finish_reason"]:
        facts.append(f"finish {printable(node['finish_reason'])}")
    if node["num_aborts"]:
        facts.append(f"{node['num_aborts']} aborts")
    yield f"{'  '.join(facts)}  [{printable(node['state_key'][:12])}]"
    for message in node["messages"]:
        yield from _message(message, full)
    if node["token_ids"]:
        yield from (f"  {line}" for line in _tokens(node, decode, full))


def _message(message: JsonObject, full: bool) -> Iterator[str]:
    call_id = message.get("tool_call_id")
    yield (
        f"  {printable(str(message.get('role')))}" + (f" (answers {printable(str(call_id))})" if call_id else "") + ":"
    )
    if message.get("reasoning_content"):
        yield "    (reasoning)"
        yield from block(str(message["reasoning_content"]), full)
    content = message.get("content")
    if content:
        yield from block(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False), full)
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        text = f"{function.get('name')}({function.get('arguments')})  [{call.get('id')}]"
        yield f"    calls {_shorten(printable(text), full)}"


def block(text: str, full: bool, *, keep_end: bool = False) -> list[str]:
    """Indented lines of a text; its own line breaks stay. `keep_end`: a long text loses its middle, not its end."""
    return [
        f"    {''.join('    ' if char == chr(9) else printable(char) for char in line)}"
        for line in _shorten(text, full, keep_end=keep_end).split("\n")
    ]


def _shorten(text: str, full: bool, *, keep_end: bool = False) -> str:
    if full or len(text) <= _MAX_CHARS + _SLACK_CHARS:
        return text
    note = f"({len(text) - _MAX_CHARS} characters more; --full shows them)"
    if keep_end:
        half = _MAX_CHARS // 2
        return f"{text[:half]}... {note} ...{text[-half:]}"
    return f"{text[:_MAX_CHARS]}... {note}"


def _tokens(node: NodeDoc, decode: Decode | None, full: bool) -> list[str]:
    """The token table of a node. Runs of equal mask are shortened in their middle."""
    ids, mask = node["token_ids"], node["loss_mask"]
    versions = [version for _, length, version in node["weight_spans"] for _ in range(length)]
    rows: list[tuple[str, ...]] = [("#", "id", "mask", "logprob", "version", *(("text",) if decode else ()))]
    for index in _shown(mask, full):
        if index is None:
            rows.append(("...",))
            continue
        sampled = bool(mask[index])
        rows.append(
            (
                str(index),
                str(ids[index]),
                str(mask[index]),
                f"{node['logprobs'][index]:.4f}" if sampled else "-",
                str(versions[index]) if sampled and index < len(versions) else "-",
                *((f"'{printable(decode([ids[index]]))}'",) if decode else ()),
            )
        )
    return _table(rows)


def _shown(mask: Sequence[int], full: bool) -> Iterator[int | None]:
    """Positions to show; None where some are left out."""
    start = 0
    for end in range(1, len(mask) + 1):
        if end < len(mask) and mask[end] == mask[start]:
            continue
        if full or end - start <= _HEAD_TOKENS + _TAIL_TOKENS + 1:
            yield from range(start, end)
        else:
            yield from range(start, start + _HEAD_TOKENS)
            yield None
            yield from range(end - _TAIL_TOKENS, end)
        start = end


def _request_rows(requests: Iterable[RequestDoc]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("request", "protocol", "match", "node", "status", "finish", "tokens", "arrived", "latency")
    ]
    for request in requests:
        usage = request["usage"] or {}
        tokens = f"{usage.get('prompt_tokens', 0)} + {usage.get('completion_tokens', 0)}" if usage else "-"
        status = "-" if request["http_status"] is None else str(request["http_status"])
        rows.append(
            (
                printable(request["request_id"]),
                request["protocol"] + (" stream" if request["stream"] else ""),
                " ".join([request["match"] or "-", *(f"+{printable(repair)}" for repair in request["repairs"])]),
                "-" if request["node_id"] is None else str(request["node_id"]),
                status + (f" {printable(request['error_code'])}" if request["error_code"] else ""),
                printable(request["finish_reason"] or "-"),
                tokens,
                f"{request['arrived_s']:.2f}s",
                "-" if request["latency_s"] is None else f"{request['latency_s']:.2f}s",
            )
        )
    return rows


def _differences(requests: Iterable[RequestDoc]) -> Iterator[str]:
    for request in requests:
        difference = request["difference"]
        if difference:
            old, new = (_shorten(json.dumps(difference.get(key), ensure_ascii=False), False) for key in ("old", "new"))
            where = printable(str(difference.get("pointer")))
            yield f"  {printable(request['request_id'])} left the known history at {where}:"
            yield f"    was {printable(old)}"
            yield f"    now {printable(new)}"


def _contexts(doc: SessionDoc, full: bool) -> Iterator[str]:
    """Every exported context: a table, then what does not fit into it."""
    contexts = doc["contexts"] if full else doc["contexts"][:_MAX_CONTEXTS]
    yield "contexts"
    yield from _table(_context_rows(contexts))
    if len(contexts) < len(doc["contexts"]):
        yield f"  ({len(doc['contexts']) - len(contexts)} more contexts; --full lists all)"
    if not all(context["num_trainable"] for context in contexts):
        yield "  (trained 0: each of its turns is trained by a context that stands before it)"
    for context in contexts:
        name = printable(context["name"] or "-")
        if context["helpers"]:
            helpers = ", ".join(f"{printable(key)} {_number(value)}" for key, value in context["helpers"].items())
            yield f"  {name}, with its reward: {_shorten(helpers, full)}"
        if context["response_credits"] is not None:
            turns = zip(context["responses"], context["response_credits"], strict=True)
            credits = ", ".join(f"node {node_id} {_number(credit)}" for (node_id, _, _), credit in turns)
            yield f"  {name}, credit by turn: {_shorten(credits, full)}"
        if context["metadata"] and context["metadata"] != doc["metadata"]:
            text = printable(json.dumps(context["metadata"], ensure_ascii=False))
            yield f"  {name}, metadata: {_shorten(text, full)}"


def _context_rows(contexts: Iterable[ContextDoc]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("name", "node", "turns", "prompt", "tokens", "trained", "reward", "credit")]
    for context in contexts:
        rows.append(
            (
                printable(context["name"] or "-"),
                str(context["node_id"]),
                str(context["num_turns"]),
                str(context["prompt_len"]),
                str(context["num_tokens"]),
                str(context["num_trainable"]),
                _number(context["reward"]),
                _number(context["credit"]),
            )
        )
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns padded to their widest cell, two blanks between."""
    width = max(len(row) for row in rows)
    widths = [max((len(row[at]) for row in rows if at < len(row) - 1), default=0) for at in range(width)]
    return ["  " + "  ".join(cell.ljust(widths[at]) for at, cell in enumerate(row)).rstrip() for row in rows]
