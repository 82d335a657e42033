"""What bench/oracle.py compares."""

from __future__ import annotations

from peers.advantage_rows import CREDITS, TOKEN_ADVANTAGES
from peers.correction_rows import CORRECTIONS, REDUCTIONS
from peers.loss_rows import KL, LOGITS, LOSSES
from peers.row import Row

ROWS: list[Row] = [*CREDITS, *TOKEN_ADVANTAGES, *LOSSES, *KL, *CORRECTIONS, *REDUCTIONS, *LOGITS]
