"""Agent processes: their files, their environment, and the trainer's side of the runner that owns them.

Consumes what to start (`AgentSpec`) and a session's input; produces `AgentExit`s and the raw output of agents. It
also starts the workers of user functions.

Invariant: after a session ends no process of it is left, as far as its environment marker reaches. This is also true
after kill -9 of the trainer or of the runner.

Start with `agent_runner.py`; `files.py` is what an agent reads and writes, `environment.py` what it inherits.
"""

from silva.agent.agent_runner import AgentExit, AgentRunner, AgentSpec
from silva.agent.environment import agent_environment, parse_agent_env, trainer_environment, withheld_names
from silva.agent.files import SessionFiles, create_session, log_tail, read_output_bytes
from silva.agent.options import AgentOptions

__all__ = [
    "AgentExit", "AgentOptions", "AgentRunner", "AgentSpec", "SessionFiles", "agent_environment", "create_session",
    "log_tail", "parse_agent_env", "read_output_bytes", "trainer_environment", "withheld_names",
]  # fmt: skip
