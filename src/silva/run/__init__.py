"""A run from its options to its result: the Python door.

Consumes options (`RunConfig`), datasets and what a caller injects (engine, runner, watcher). Produces a run folder
(ledger, metrics, samples, checkpoints) and a `RunResult`. The commands call the same objects.

Invariant: every part has one owner, an exit stack, so that a run that ends early (an error, a cancelled task) ends its
agents and writes its ledger before the error is seen.

Open first: `run.py` (the door), then `train_run.py`, `runtime.py` (what runs) and `run_loop.py` (what happens when).
"""

from silva.run.check import Checks
from silva.run.factories import EngineFactory, Runner, RunnerFactory
from silva.run.prepared import saved_options
from silva.run.reexport_run import reexport
from silva.run.replay import replay_recording
from silva.run.run import Run, open_run
from silva.run.setup import RunResult
from silva.run.watcher import RunWatcher

__all__ = [
    "Checks", "EngineFactory", "Run", "RunResult", "RunWatcher", "Runner", "RunnerFactory", "open_run", "reexport",
    "replay_recording", "saved_options",
]  # fmt: skip
