"""Training: samples with credit in, weight versions out.

Consumes `TrainingSample`s and a Hugging Face model directory. Produces optimizer steps with their metrics, published
weights and checkpoints. `backend.py` is the line to the run (no torch); `learner.py` is what implements it here.

Invariant: every denominator is fixed before a batch is cut into rows, so the loss does not depend on micro-batching or
packing. The room is a leaf: it imports types, credit and model alone, so a remote worker can import it without the
rest.

Open first: `backend.py`, then `learner.py`, `packing.py`, `objective.py`; `algorithms.py` lists the algorithms.
"""
