"""The border that every reward value crosses, whoever made it."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import cast

from silva.types import SessionFailure

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80

REWARD_INVALID = "reward_invalid"
"""The ledger's word for a session whose reward cannot be used."""

MAX_ABS_REWARD = 1e12
"""Of larger magnitudes the square, which a critic and the norm of a gradient take, may overflow in float32: one such
session would spoil the step of all others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """A reward as it was given: the number that counts (None: none was given), and the other numbers of its object."""

    value: float | None
    """The number that counts; None where none was given."""
    helpers: dict[str, float] = field(default_factory=dict[str, float])
    """The other numbers of the reward object."""


def read_reward(value: object, where: str, key: str | None = None, *, allow_bool: bool = False) -> Reward:
    """A number, None, or an object of which the entry `key` (--reward-key) is the number that counts.

    The object's other numbers are helpers, a bool 0 or 1; entries that are no numbers, and names that are no text, mean
    nothing. Raises SessionFailure(reason="reward_invalid") as `check_reward`, for an object without a key or without
    that entry, and for a helper that is not finite. `where` and `allow_bool` are as there.
    """
    if value is None:
        return Reward(value=None)
    if not isinstance(value, Mapping):
        return Reward(value=check_reward(value, where, allow_bool=allow_bool))
    entries = cast("Mapping[object, object]", value)
    if key is None:
        raise _invalid(entries, where, "an object needs --reward-key, which names the entry that is the reward")
    if key not in entries:
        raise _invalid(entries, where, f"it has no entry {key!r} (--reward-key)")
    number = check_reward(entries[key], f"{where}, entry {key!r} (--reward-key)", allow_bool=allow_bool)
    helpers: dict[str, float] = {}
    for name, entry in entries.items():
        if name == key or not isinstance(name, str) or not (isinstance(entry, Real) or _is_bool(entry)):
            continue
        helpers[name] = _number(cast("Real", entry))
        if not math.isfinite(helpers[name]):
            raise _invalid(
                entry, f"{where}, entry {_SHORT.repr(name)}", "it must be finite; leave it out where it is not known"
            )
    return Reward(value=number, helpers=helpers)


def check_reward(value: object, where: str, *, allow_bool: bool = False) -> float:
    """`value` as a finite Python float; see `read_number`. `where` names the session, and the context if there is one.

    Raises SessionFailure(reason="reward_invalid") for everything that is no reward.
    """
    return read_number(value, f"the reward of {where}", allow_bool=allow_bool)


def read_number(value: object, what: str, *, allow_bool: bool = False) -> float:
    """A number that came from outside, as a finite Python float. `what` says what it is, and of whom.

    Accepts ints, floats and numpy numbers. A bool counts as 0 or 1 where `allow_bool` says so (values returned by a
    user's function), else it is refused. Raises SessionFailure(reason="reward_invalid") for everything else: None, NaN,
    infinity, magnitudes above MAX_ABS_REWARD, text, lists, objects.
    """
    if _is_bool(value):
        if allow_bool:
            return float(bool(value))
        raise _unfit(value, what, "a bool is taken only from a reward function; write 1.0 or 0.0")
    if not isinstance(value, Real):
        raise _unfit(value, what, "it must be a number")
    number = _number(value)
    if not math.isfinite(number):
        raise _unfit(value, what, "it must be finite")
    if abs(number) > MAX_ABS_REWARD:
        raise _unfit(value, what, f"its magnitude must be at most {MAX_ABS_REWARD:g}")
    return number


def short(value: object) -> str:
    """A value for an error text, short whatever it is."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python refuses to print integers of more than some thousand digits
        return "too long to print"


def shown(value: object) -> str:
    """The same with its type."""
    return f"{short(value)} ({type(value).__name__})"


def _number(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _is_bool(value: object) -> bool:
    from numpy import bool_  # here, so that whoever only reads options does not load it

    return isinstance(value, bool | bool_)


def _invalid(value: object, where: str, rule: str) -> SessionFailure:
    return _unfit(value, f"the reward of {where}", rule)


def _unfit(value: object, what: str, rule: str) -> SessionFailure:
    return SessionFailure(REWARD_INVALID, f"{what} is {shown(value)}: {rule}")
