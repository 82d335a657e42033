"""Lossy echoes: what a client may lose of an assistant message so that it is still the turn that was sampled.

Clients trim texts, drop the reasoning, give calls ids of their own, and have nothing to send back of an empty answer.
None of this is a new turn: the request continues behind the stored tokens, and each repair is reported and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from silva.forest.identity import echo_digest
from silva.forest.node import NO_RENAMES, Node, Repair, RepairKind
from silva.types import Message

EchoMatch = Literal["lenient", "exact"]
MessageAt = Callable[[int], Message]
MessagesBetween = Callable[[int, int], tuple[Message, ...]]
"""The request's canonical messages from one index up to (not with) another."""

NOTHING = echo_digest(Message(role="assistant"))
"""The echo digest of an answer that says and calls nothing."""


class EchoIndex:
    """Every sampled answer of a session, by the state that it answers."""

    def __init__(self) -> None:
        self._by_state: dict[bytes, dict[bytes, list[tuple[Message, Node]]]] = {}

    def add(self, before: bytes, message: Message, node: Node) -> None:
        """The state with key `before` was answered by `message`, which led to `node`."""
        self._by_state.setdefault(before, {}).setdefault(echo_digest(message), []).append((message, node))

    def find(self, before: bytes, index: int, message_at: MessageAt, num_messages: int) -> tuple[Node, Repair] | None:
        """The answer to the state `before` that message `index` of the request echoes with losses.

        The only one, else the newest (which makes the repair `ambiguous`); None where there is none.
        """
        here = self._by_state.get(before)
        if here is None:
            return None
        echo = message_at(index)
        answers = here.get(echo_digest(echo)) if echo.role == "assistant" else None
        if answers is None:
            return None
        found: tuple[Node, Repair] | None = None
        named: list[str] | None = None
        for said, node in reversed(answers):
            repair = _losses(echo, said)
            if repair is None:
                continue
            if "call_ids" in repair.kinds:
                if named is None:
                    named = _named_results(index + 1, message_at, num_messages)
                if not _all_known(named, echo, said):
                    continue
            if found is None:
                found = (node, repair)
            elif found[0].key != node.key:
                kinds = (*found[1].kinds, "ambiguous")
                return found[0], Repair(kinds=kinds, renames=found[1].renames)
        return found

    def unsaid(self, before: bytes) -> tuple[Node, Repair] | None:
        """An answer to the state `before` without text or calls, of which nothing may come back; chosen as in `find`.

        Its thoughts, where it has some, are missing as well then.
        """
        # One that goes on with a cut turn and adds nothing to it leads to the state where it began.
        answers = [(said, node) for said, node in self._by_state.get(before, {}).get(NOTHING, ()) if node.key != before]
        if not answers:
            return None
        said, node = answers[-1]
        kinds: list[RepairKind] = ["answer_missing"]
        if said.reasoning.strip():
            kinds.append("reasoning_missing")
        if any(other.key != node.key for _, other in answers):
            kinds.append("ambiguous")
        return node, Repair(kinds=tuple(kinds), renames=NO_RENAMES)


def compare_echo(echo: Message, said: Message) -> Repair | None:
    """What an assistant message lost of `said`; None where it is another message. Results of calls are ignored.

    Texts may differ in outer blanks, the reasoning may be gone, calls may have other ids, each its own.
    """
    return _losses(echo, said) if echo_digest(echo) == echo_digest(said) else None


def _losses(echo: Message, said: Message) -> Repair | None:
    """As `compare_echo`, for messages whose echo digests are known to be equal."""
    reasoning = echo.reasoning.strip()
    missing = not reasoning and bool(said.reasoning.strip())
    if not missing and reasoning != said.reasoning.strip():
        return None
    new = [call.id for call in echo.tool_calls if call.id]
    if len(set(new)) != len(new):
        return None
    renames = {a.id: b.id for a, b in zip(echo.tool_calls, said.tool_calls, strict=True) if a.id != b.id}
    kinds: list[RepairKind] = []
    if echo.content != said.content or (not missing and echo.reasoning != said.reasoning):
        kinds.append("blanks")
    if missing:
        kinds.append("reasoning_missing")
    if renames:
        kinds.append("call_ids")
    renames.pop("", None)
    return Repair(kinds=tuple(kinds), renames=renames or NO_RENAMES)


def _named_results(start: int, message_at: MessageAt, num_messages: int) -> list[str]:
    """Ids that the run of tool results from `start` on answers."""
    named: list[str] = []
    for index in range(start, num_messages):
        message = message_at(index)
        if message.role != "tool":
            break
        if message.tool_call_id is not None:
            named.append(message.tool_call_id)
    return named


def _all_known(named: Sequence[str], echo: Message, said: Message) -> bool:
    """Whether each result answers a call of the echo; one that came without an id, by the id that was given."""
    known = {mine.id or given.id for mine, given in zip(echo.tool_calls, said.tool_calls, strict=True)}
    return all(name in known for name in named)
