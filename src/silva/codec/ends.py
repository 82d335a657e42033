"""How a template ends an assistant turn, found by rendering a few."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from silva.codec.encoder import ControlToken, TokenText
from silva.codec.frame import Frame
from silva.codec.slots import CONTEXT, Hole
from silva.types import JsonObject

_TEXT, _REASON, _ARGS, _RESULT, _NEXT, _CALL_ID = (Hole(CONTEXT, 40 + i) for i in range(6))


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnEnds:
    """The tokens that end an assistant turn.

    Example (ChatML): `<|im_end|>` is the only stop id and closer, there are no markers, and `opener` is False.
    """

    stop_ids: frozenset[int]
    """The ids that end a sampled turn."""
    closers: frozenset[int]
    """The ids that end a turn in a render: the stop ids, and what the template writes behind old turns."""
    markers: frozenset[int]
    """The role markers that end a turn in an opener template; empty for other templates."""
    opener: bool
    """Whether only the marker of the next role ends a turn."""
    end_id: int | None
    """The stop id that the template writes, else the smallest; None where there is none."""
    pattern: re.Pattern[str] = field(repr=False)
    """Finds the text of any closer."""


def find_ends(frame: Frame, called: Frame, text: TokenText, configured: Iterable[int], eos_id: int | None) -> TurnEnds:
    """`frame` renders without tools, `called` with one; `configured` are the stop ids of the model's files."""
    stops = frozenset(configured)
    user, reply = _turn("user", Hole(CONTEXT, 39)), _turn("assistant", _TEXT)
    last = _first_after(text, frame.try_render([user, reply]), _TEXT)
    then_user = _first_after(text, frame.try_render([user, reply, _turn("user", _NEXT)], gen=True), _TEXT)
    reopened = _first_after(text, frame.try_render([user, reply], gen=True), _TEXT)
    opener = last is None and then_user is not None and then_user != reopened and then_user.id != eos_id
    markers: set[ControlToken] = set()
    closes = {token for token in (last, then_user) if token is not None}
    if opener:
        markers = {token for token in (then_user, _result_marker(called, text, user)) if token is not None}
        closes = set(markers)
    inside = _inside_turn(frame, called, text, user)
    stop_ids = stops | {token.id for token in closes if token.id not in inside}
    closers = stop_ids | {token.id for token in closes}
    order = [token.id for token in (last, then_user) if token is not None and token.id in stop_ids]
    end_id = order[0] if order else min(stop_ids, default=None)
    spellings = sorted((text.by_id[i].text for i in closers if i in text.by_id), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, spellings)) if spellings else "(?!)")
    return TurnEnds(
        stop_ids=stop_ids,
        closers=closers,
        markers=frozenset(token.id for token in markers),
        opener=opener,
        end_id=end_id,
        pattern=pattern,
    )


def _turn(role: str, content: Hole) -> JsonObject:
    return {"role": role, "content": content}


def _call(called: Frame) -> JsonObject:
    return called.style.calling_turn(_CALL_ID, called.tool_name, _ARGS)


def _tokens_after(text: TokenText, render: str, hole: Hole) -> list[ControlToken]:
    _, found, rest = render.rpartition(hole.placeholder)
    return [item for item in text.split(rest) if isinstance(item, ControlToken)] if found else []


def _first_after(text: TokenText, render: str, hole: Hole) -> ControlToken | None:
    return next(iter(_tokens_after(text, render, hole)), None)


def _result_marker(called: Frame, text: TokenText, user: object) -> ControlToken | None:
    """The marker that opens a tool turn behind a call."""
    result = {"role": "tool", "content": _RESULT, "tool_call_id": _CALL_ID}
    alone = _tokens_after(text, called.try_render([user, _call(called)]), _ARGS)
    more = _tokens_after(text, called.try_render([user, _call(called), result]), _ARGS)
    return more[len(alone)] if more[: len(alone)] == alone and len(more) > len(alone) else None


def _inside_turn(frame: Frame, called: Frame, text: TokenText, user: object) -> frozenset[int]:
    """Control tokens within one assistant turn, so that none of them can end it."""
    thought = {**_turn("assistant", _TEXT), "reasoning_content": _REASON, "thinking": _REASON}
    found: set[int] = set()
    for turns in ([user, thought], [user, {**_call(called), "reasoning_content": _REASON, "thinking": _REASON}]):
        for renderer in (frame, called):
            _, seen, rest = renderer.try_render(turns).partition(_REASON.placeholder)
            within = re.split(f"{_TEXT.placeholder}|{_ARGS.placeholder}", rest)[0] if seen else ""
            found.update(item.id for item in text.split(within) if isinstance(item, ControlToken))
    return frozenset(found)
