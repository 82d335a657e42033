"""What a session was worth, and whether its group counts.

Consumes ended sessions with their samples; produces rewards, credits and the end of the group. Reward functions and
custom advantages of the user run in worker processes.

Invariant: one rule decides how a group ends, for a live run, a re-export and a run on recorded samples.

Open `group_end.py` first, then `rewards.py` and `user_function.py`.
"""

from silva.judge.credit_stage import GroupCredit
from silva.judge.custom_advantage import ADVANTAGE_PARAMS, CustomAdvantage
from silva.judge.group_end import (
    UNFIT,
    CreditStage,
    GroupResult,
    GroupSettings,
    Outcome,
    RewardStage,
    SlotEnd,
    SlotFailure,
    checked,
    close_group,
    judge_group,
    judge_session,
)
from silva.judge.options import RewardOptions
from silva.judge.rewards import GROUP_RM_PARAMS, RM_PARAMS, Rewards
from silva.judge.sample_views import Decode
from silva.judge.user_function import UserCodeError, UserFunction, UserFunctionPool

__all__ = [
    "ADVANTAGE_PARAMS", "GROUP_RM_PARAMS", "RM_PARAMS", "UNFIT", "CreditStage", "CustomAdvantage", "Decode",
    "GroupCredit", "GroupResult", "GroupSettings", "Outcome", "RewardOptions", "RewardStage", "Rewards", "SlotEnd",
    "SlotFailure", "UserCodeError", "UserFunction", "UserFunctionPool", "checked", "close_group", "judge_group",
    "judge_session",
]  # fmt: skip
