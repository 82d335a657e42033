"""The sessions of one prompt, from the first start to the group's result.

Consumes prompts; produces group results and the rows of every session. `GroupDriver` is the seam to whatever runs the
sessions: an agent process each, or a loop in this process.

Invariants: a failed session is data and never ends the run by itself; a retried session is a new session in the same
slot; only `Leases` opens and closes the gates of sessions.

Open `group_runner.py` first, then `group_driver.py` and `leases.py`.
"""

from silva.rollout.failure_budget import FailureBudget
from silva.rollout.group_driver import EachSession, GroupDriver, SessionDriver
from silva.rollout.group_runner import GroupRunner
from silva.rollout.group_tally import GroupTally, StepGroups, first_reward, tally
from silva.rollout.leases import Leases
from silva.rollout.open_sessions import OpenSessions
from silva.rollout.options import RolloutOptions
from silva.rollout.process_driver import AgentProcesses, ProcessDriver
from silva.rollout.recorded_groups import RecordedGroups
from silva.rollout.reexport import Account, Reexport, Side

__all__ = [
    "Account", "AgentProcesses", "EachSession", "FailureBudget", "GroupDriver", "GroupRunner", "GroupTally", "Leases",
    "OpenSessions", "ProcessDriver", "RecordedGroups", "Reexport", "RolloutOptions", "SessionDriver", "Side",
    "StepGroups", "first_reward", "tally",
]  # fmt: skip
