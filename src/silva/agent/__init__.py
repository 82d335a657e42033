"""Agent processes: their files, their environment, and the trainer's side of the runner that owns them.

Consumes what to start (`AgentSpec`) and a session's input; produces `AgentExit`s and the raw output of agents. It
also starts the workers of user functions.

Invariant: after a session ends no process of it is left, as far as its environment marker reaches. This also holds
after kill -9 of the trainer or of the runner.

Start with `agent_runner.py`; `files.py` is what an agent reads and writes, `environment.py` what it inherits.
"""
