"""`prepare` sets what torch reads at its first import, and leaves what the user chose."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SCRIPT = """
import json, os, sys
from silva.model import torch_env
if sys.argv[1] == "late":
    sys.modules["torch"] = sys
early = torch_env.prepare(decodes=sys.argv[1] != "serving")
names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
print(json.dumps([early, [os.environ.get(name) for name in names], sys.getswitchinterval() < 0.001]))
"""


def prepared(when: str, **environment: str) -> list[object]:
    base = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    command = [sys.executable, "-c", SCRIPT, when]
    done = subprocess.run(command, env={**base, **environment}, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_prepare_before_torch_sets_the_waiting_policy() -> None:
    assert prepared("early") == [True, ["passive", "0"], True]
    assert prepared("serving") == [True, ["passive", "0"], False]
    assert prepared("early", OMP_WAIT_POLICY="active") == [True, ["active", "0"], True]


def test_prepare_after_torch_says_so_and_leaves_the_environment() -> None:
    assert prepared("late") == [False, [None, None], True]
