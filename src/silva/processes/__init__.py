"""What child processes of the trainer run: the runner that owns agents, and the workers of user functions.

Consumes messages of the trainer (`frames.py` lists them); produces reports of ends, and values of user functions.

Invariant: only the standard library, and no import of another room but `types`: a child starts in a few hundredths of a
second, and nothing that an agent or a user function does in it can touch the trainer.

Start with `runner.py`; `sweep.py` finds and ends processes by their marker, `user_worker.py` calls user functions.
"""

from silva.processes.frames import Message, child_command, pack, read_message
from silva.processes.sweep import RUN_MARKER, sweep_run

__all__ = ["RUN_MARKER", "Message", "child_command", "pack", "read_message", "sweep_run"]
