"""From the rewards of a group to credit: one number per context or turn.

Consumes the rewards of the sessions of a group and the contexts that they exported; produces the same contexts with
their credit, statistics of the groups, and pass rates.

Invariant: pure. No NaN or infinity goes in or comes out, equal rewards give exactly 0, and a turn that several contexts
share is trained once, with the mean of their credits (or in each, by option).

Open `assign.py` first; one estimator per file (`grpo.py`, `rloo.py`, `maxrl.py`).
"""

from silva.credit.assign import GroupStats, assign_group_credit, session_reward
from silva.credit.grpo import standardised
from silva.credit.hook import CUSTOM_FAILED, hook_input, read_credits
from silva.credit.maxrl import relative_to_mean
from silva.credit.passrate import pass_rates
from silva.credit.reward import Reward, read_reward
from silva.credit.rloo import leave_one_out
from silva.credit.shared import CreditShare, by_session, num_shared_responses, spread_credits, train_shared
from silva.credit.spread import CreditFunction, centred, reward_itself

__all__ = [
    "CUSTOM_FAILED", "CreditFunction", "CreditShare", "GroupStats", "Reward", "assign_group_credit", "by_session",
    "centred", "hook_input", "leave_one_out", "num_shared_responses", "pass_rates", "read_credits", "read_reward",
    "relative_to_mean", "reward_itself", "session_reward", "spread_credits", "standardised", "train_shared",
]  # fmt: skip
