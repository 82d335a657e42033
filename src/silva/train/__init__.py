"""Training: samples with credit in, weight versions out.

Consumes `TrainingSample`s and a Hugging Face model directory. Produces optimizer steps with their metrics, published
weights and checkpoints. `backend.py` is the line to the run (no torch); `learner.py` is what implements it here.

Invariant: every denominator is fixed before a batch is cut into rows, so the loss does not depend on micro-batching or
packing. The room is a leaf: it imports types, credit and model alone, so a remote worker can import it without the
rest.

Open first: `backend.py`, then `learner.py`, `packing.py`, `objective.py`; `algorithms.py` lists the algorithms.
"""

from silva.train.algorithms import ALGORITHMS, SPECIAL_OPTIONS, Algorithm, credit_function
from silva.train.backend import TrainBackend
from silva.train.checkpoint import checkpoint_dir, latest_checkpoint, prune_checkpoints
from silva.train.options import ClipOptions, KlOptions, TisOptions, TrainingOptions
from silva.train.schedule import Schedule
from silva.train.step_result import StepResult

__all__ = [
    "ALGORITHMS", "SPECIAL_OPTIONS", "Algorithm", "ClipOptions", "KlOptions", "Schedule", "StepResult", "TisOptions",
    "TrainBackend", "TrainingOptions", "checkpoint_dir", "credit_function", "latest_checkpoint", "prune_checkpoints",
]  # fmt: skip
