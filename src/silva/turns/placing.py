"""From a matched request to a placement: where a turn goes in the forest, and its new prompt tokens. Pure."""

from __future__ import annotations

from array import array
from dataclasses import replace

from silva.codec import Past, SampledTail, TurnCodec, TurnDelta
from silva.forest import Match, MessagesBetween, Node, Placement
from silva.types import Message, TransitionRefused


def place_turn(codec: TurnCodec, match: Match, messages_between: MessagesBetween) -> Placement:
    """Decide where the request's turn goes in the forest and form the new tokens.

    Raises TransitionRefused (with the index of the message in the request) where the chat template cannot do the step.
    """
    parent = match.parent

    def as_known(start: int, stop: int) -> tuple[Message, ...]:
        return match.as_known(start, messages_between(start, stop))

    if parent is not None and match.is_full:
        return _sample_again(codec, match, parent, as_known)
    if parent is not None and parent.kind == "observation":
        return _extend_observation(codec, match, parent, as_known)
    return _new_observation(codec, match, as_known)


def _sample_again(codec: TurnCodec, match: Match, parent: Node, messages_between: MessagesBetween) -> Placement:
    if parent.kind == "observation":
        earlier = next(child for child in parent.children if child.kind == "response")
        return Placement(match=match, lead_ids=tuple(earlier.ids[: earlier.lead]))
    if parent.cut and parent.ids[-1] not in codec.stop_ids:
        return Placement(match=match, continues=True)
    delta = _encode(codec, match, (), messages_between)
    return Placement(match=match, lead_ids=(*delta.observation_ids, *delta.opening_ids))


def _extend_observation(codec: TurnCodec, match: Match, parent: Node, messages_between: MessagesBetween) -> Placement:
    """A longer tail after a committed observation: its child where the tokens allow it, else a sibling.

    A run of tool results is one unit, so a longer run never becomes a child.
    """
    lower = match.at_last_turn()
    held: list[int] = []
    known: tuple[Message, ...] = ()
    node = parent
    while node.kind == "observation":
        held[:0] = node.ids
        known = (*node.messages, *known)
        assert node.parent is not None
        node = node.parent

    def first_seen(start: int, stop: int) -> tuple[Message, ...]:
        """Where messages match without being equal, the model keeps those that it has read."""
        middle = max(start, min(stop, match.num_matched))
        at = start - lower.num_matched
        old = known[at : at + middle - start] if at >= 0 else messages_between(start, middle)
        return (*old, *messages_between(middle, stop))

    whole = _new_observation(codec, lower, first_seen)
    added = messages_between(match.num_matched, match.num_messages)
    if parent.messages[-1].role == "tool" and added[0].role == "tool":
        return whole
    ids = whole.observation_ids
    if len(ids) <= len(held) or list(ids[: len(held)]) != held:
        return whole
    return replace(whole, match=match, messages=added, observation_ids=ids[len(held) :])


def _new_observation(codec: TurnCodec, match: Match, messages_between: MessagesBetween) -> Placement:
    messages = messages_between(match.num_matched, match.num_messages)
    delta = _encode(codec, match, messages, messages_between)
    return Placement(
        match=match,
        messages=messages,
        observation_ids=array("i", delta.observation_ids),
        lead_ids=tuple(delta.opening_ids),
        marker_mismatch=delta.marker_mismatch,
    )


def _encode(
    codec: TurnCodec, match: Match, messages: tuple[Message, ...], messages_between: MessagesBetween
) -> TurnDelta:
    parent = match.parent
    try:
        if parent is None or parent.kind == "root":
            return codec.encode_root(messages, match.conversation)
        tail = SampledTail(
            message=parent.messages[-1],
            last_id=parent.ids[-1],
            cut=parent.ids[-1] not in codec.stop_ids,
            has_system=messages_between(0, 1)[0].role == "system",
            past=lambda: past_of(parent),
        )
        return codec.encode_delta(tail, messages, match.conversation)
    except TransitionRefused as refused:
        raise refused.at(_shifted(refused.field, match.num_matched)) from refused


def past_of(response: Node) -> Past:
    """The messages before a sampled turn. A turn that was continued is one whole message."""
    messages: list[Message] = []
    num_given: int | None = None
    for node in response.path():
        if node.kind == "response":
            num_given = len(messages) if num_given is None else num_given
            if node.continues:
                messages.pop()
        messages.extend(node.messages)
    return Past(messages=tuple(messages[:-1]), num_given=len(messages) - 1 if num_given is None else num_given)


def _shifted(field: str | None, offset: int) -> str | None:
    """`messages[i]` counted in the delta becomes `messages[i + offset]` counted in the request."""
    if field is None or not field.startswith("messages[") or "]" not in field:
        return field
    index, _, rest = field.removeprefix("messages[").partition("]")
    return f"messages[{int(index) + offset}]{rest}" if index.isdigit() else field
