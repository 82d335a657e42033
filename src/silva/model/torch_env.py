"""Process settings for torch and the tokenizers: some of torch's are read only once, when it is first imported."""

from __future__ import annotations

import os
import sys

_DEFAULTS = {
    # With the default policy idle OpenMP threads spin; on shared cores that costs more than the work itself.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
}

# Texts are encoded one at a time: a pool of threads would only be woken for each.
_TOKENIZERS = "TOKENIZERS_PARALLELISM"

# The engine's thread lets the interpreter lock go at each torch call. With the usual 5 ms it then waits so long for a
# busy event loop that decoding of a small model drops to less than half.
_SWITCH_INTERVAL_S = 1e-4


def prepare(*, decodes: bool = True) -> bool:
    """Set this process up for torch beside an event loop on shared cores. Variables that the user set are kept.

    `decodes`: a torch engine runs in this process. Without one short thread switches only cost (a fifth of the
    gateway's CPU with 16 turns in flight). Returns False when torch is already imported: then its own settings come too
    late.
    """
    if decodes:
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
    os.environ.setdefault(_TOKENIZERS, "false")
    if "torch" in sys.modules:
        return False
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    return True


def limit_threads(num_threads: int) -> None:
    """Let torch operations of the calling thread use at most `num_threads` cores."""
    import torch

    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
