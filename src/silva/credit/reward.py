"""The border that every reward value crosses, whoever made it."""

from __future__ import annotations

import math
import reprlib
from numbers import Real

import numpy as np

from silva.types.errors import SessionFailure

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80

REWARD_INVALID = "reward_invalid"
"""The ledger's word for a session whose reward cannot be used."""

MAX_ABS_REWARD = 1e30
"""Larger magnitudes overflow in float32, where the loss is computed: they are as bad as infinity."""


def check_reward(value: object, where: str, *, allow_bool: bool = False) -> float:
    """`value` as a finite Python float.

    Accepts ints, floats and numpy numbers. A bool counts as 0 or 1 where `allow_bool` says so (values returned by a
    user's reward function), else it is refused. `where` names the session, and the context if there is one.
    Raises SessionFailure(reason="reward_invalid") for everything else: None, NaN, infinity, text, lists, objects.
    """
    if _is_bool(value):
        if allow_bool:
            return float(bool(value))
        raise _invalid(value, where, "a bool is taken only from a reward function; write 1.0 or 0.0")
    if not isinstance(value, Real):
        raise _invalid(value, where, "it must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _invalid(value, where, "it must be finite")
    if abs(number) > MAX_ABS_REWARD:
        raise _invalid(value, where, f"its magnitude must be at most {MAX_ABS_REWARD:g}")
    return number


def _is_bool(value: object) -> bool:
    return isinstance(value, bool | np.bool_)


def _invalid(value: object, where: str, rule: str) -> SessionFailure:
    try:
        shown = _SHORT.repr(value)
    except ValueError:  # Python refuses to print integers of more than some thousand digits
        shown = "too long to print"
    return SessionFailure(REWARD_INVALID, f"the reward of {where} is {shown} ({type(value).__name__}): {rule}")
