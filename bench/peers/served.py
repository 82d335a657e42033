"""What runs in the peer's Python: reads jobs and cases, calls the peer, writes what came out.

    PYTHON bench/peers/verl_peer.py JOBS.json CASES.npz OUT.npz

JOBS.json is a list of [name of the job, name of the case, options]. OUT.npz gets, for job i, an array `i/<part>` for
each thing that it returned, or the text `i/error`. Everything is float64 where the peer allows it; an option
`"dtype": "float32"` makes the inputs of one job float32. The default type of torch is set with it, since peers build
tensors of that type on the way.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch


@dataclass
class Job:
    case: dict
    options: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float64


def tensors(job: Job) -> types.SimpleNamespace:
    """The arrays of a case as tensors; `group` stays as it is. See cases.py for what they are."""
    out = {}
    for name, array in job.case.items():
        if name == "group":
            out[name] = array
        else:
            out[name] = torch.tensor(array, dtype=job.dtype if array.dtype.kind in "fb" else None)
    return types.SimpleNamespace(**out)


def of_logits(part: str, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Job], dict]:
    """A job: `compute(logits_NV, targets_N)` [N] of the case as `part`, and the gradient of its sum."""

    def run(job: Job) -> dict:
        logits = torch.tensor(job.case["logits"]).requires_grad_()
        value = compute(logits, torch.tensor(job.case["targets"]))
        (grad,) = torch.autograd.grad(value.sum(), logits)
        return {part: value, "grad": grad}

    return run


def serve(functions: dict) -> None:
    jobs_path, cases_path, out_path = sys.argv[1:]
    torch.set_num_threads(1)
    jobs = json.loads(Path(jobs_path).read_text())
    with np.load(cases_path) as held:
        arrays = dict(held)
    cases: dict[str, dict] = {}
    for path, array in arrays.items():
        case, name = path.split("/")
        cases.setdefault(case, {})[name] = array
    out = {}
    for i, (name, case, options) in enumerate(jobs):
        options = dict(options)
        dtype = getattr(torch, options.pop("dtype", "float64"))
        torch.set_default_dtype(dtype)
        try:
            parts = functions[name](Job(cases[case], options, dtype))
        except ValueError as error:  # the peer's refusal is a result too
            out[f"{i}/error"] = np.array(f"{name} {case}: {error}"[:300])
            continue
        for part, value in parts.items():
            out[f"{i}/{part}"] = value.detach().double().numpy()
    np.savez(out_path, **out)
