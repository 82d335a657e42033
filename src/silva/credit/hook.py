"""The user's function that gives credit to the contexts of a group: what it is given, and what it may return.

It is called once a group with a list of one object a session, in the order of the slots: the name of each exported
context (None for the one of an agent that named none) with that context's metadata. It returns a list of the same
order with a credit for each name, or None for a group that is not to be trained.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from silva.credit.reward import read_number, short, shown
from silva.credit.shared import ContextCredit, by_session
from silva.types import GroupEnd, JsonObject, SessionFailure, TrainingSample

CUSTOM_NONE = "custom_advantage_none"
CUSTOM_INVALID = "custom_advantage_invalid"
CUSTOM_FAILED = "custom_advantage_failed"
"""The ledger's words for a group that the function took out, or for which it gave nothing that can be used."""

HookInput = list[dict[str | None, JsonObject]]


def hook_input(samples: Iterable[TrainingSample]) -> HookInput:
    """What the function is given for these contexts of a group. The metadata are copies that it may change."""
    return [
        {name: copy.deepcopy(sample.metadata) for name, sample in contexts.items()}
        for contexts in _by_name(samples).values()
    ]


def read_credits(value: object, samples: Sequence[TrainingSample]) -> list[ContextCredit]:
    """What the function returned, as one credit for each of `samples`, in their order.

    A credit is a number (int, float, numpy number, array without dimensions; a bool is 0 or 1), or a list, tuple or
    array of them with one for each response of the context. Raises GroupEnd: `custom_advantage_none` (filtered) for
    None, else `custom_advantage_invalid` with the session, the context, what was found and what is expected.
    """
    sessions = _by_name(samples)
    if value is None:
        raise GroupEnd(CUSTOM_NONE, "the custom advantage function returned None for the group", state="filtered")
    if not isinstance(value, list | tuple):
        raise _invalid(f"{shown(value)}; it must be a list with one dict for each of the {len(sessions)} sessions")
    items = cast("Sequence[object]", value)
    if len(items) != len(sessions):
        raise _invalid(
            f"a list of {len(items)} for {len(sessions)} sessions; it must hold a dict for each it was given, in order "
            "(failed sessions of the group are not among them)"
        )
    credit_of: dict[tuple[str, str | None], ContextCredit] = {}
    for at, (item, (session_id, contexts)) in enumerate(zip(items, sessions.items(), strict=True)):
        where = f"session {session_id} (item {at})"
        named = _names(item, contexts, where)
        for name, sample in contexts.items():
            credit_of[session_id, name] = _credit(named[name], sample, f"{where}, context {short(name)}")
    return [credit_of[sample.session_id, sample.name] for sample in samples]


def _by_name(samples: Iterable[TrainingSample]) -> dict[str, dict[str | None, TrainingSample]]:
    """The contexts of each session by name; sessions in the order in which they appear, which is that of the slots."""
    sessions: dict[str, dict[str | None, TrainingSample]] = {}
    for contexts in by_session(samples):
        named = {sample.name: sample for sample in contexts}
        assert len(named) == len(contexts), f"session {contexts[0].session_id} has two contexts of one name"
        sessions[contexts[0].session_id] = named
    return sessions


def _names(item: object, contexts: Mapping[str | None, TrainingSample], where: str) -> Mapping[object, object]:
    """One session's part of the result, which must name exactly its contexts."""
    wanted = ", ".join(map(short, contexts))
    if not isinstance(item, Mapping):
        raise _invalid(f"{shown(item)} for {where}; it must be a dict with the context(s) {wanted}")
    named = cast("Mapping[object, object]", item)
    missing = [name for name in contexts if name not in named]
    if missing:
        raise _invalid(
            f"no credit for {where}, context {short(missing[0])}; it exported the context(s) {wanted}, and each needs "
            f"one. It gave: {', '.join(map(short, list(named)[:8])) or 'nothing'}"
        )
    extra = [name for name in named if name not in contexts]
    if extra:
        raise _invalid(
            f"a credit ({shown(named[extra[0]])}) for {where}, context {short(extra[0])}, which that session did not "
            f"export; it has the context(s) {wanted}"
        )
    return named


def _credit(value: object, sample: TrainingSample, where: str) -> ContextCredit:
    from numpy import ndarray  # here, so that whoever only reads options does not load it

    if isinstance(value, ndarray):
        value = cast("object", value.tolist())
    if not isinstance(value, list | tuple):
        return _number(value, f"the credit of {where}")
    values = cast("Sequence[object]", value)
    if len(values) != len(sample.responses):
        raise _invalid(
            f"{shown(values)} as the credit of {where}: {len(values)} value(s), but the context has "
            f"{len(sample.responses)} response(s); give one number, or one for each response"
        )
    return tuple(_number(each, f"value {at} of the credit of {where}") for at, each in enumerate(values))


def _number(value: object, what: str) -> float:
    try:
        return read_number(value, what, allow_bool=True)
    except SessionFailure as failure:
        raise _invalid(f"what cannot be used: {failure}") from failure


def _invalid(what: str) -> GroupEnd:
    return GroupEnd(CUSTOM_INVALID, f"the custom advantage function returned {what}")
