"""A run from its options to its result: the Python door.

Consumes options (`RunConfig`), datasets and what a caller injects (engine, runner, watcher). Produces a run folder
(ledger, metrics, samples, checkpoints) and a `RunResult`. The commands call the same objects.

Invariant: every part has one owner, an exit stack, so that a run that ends early (an error, a cancelled task) ends its
agents and writes its ledger before the error is seen.

Open first: `open_run.py` (the door), then `train_run.py`, `runtime.py` (what runs) and `loop.py` (what happens when).
"""
