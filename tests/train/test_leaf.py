"""train is a leaf: a worker elsewhere can import it without the rest of Silva."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        room = name.split(".")[1] if name.startswith("silva.") else None
        if room not in (None, "types", "credit", "model", "train"):
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, Blocked())
import silva.train

for info in pkgutil.walk_packages(silva.train.__path__, "silva.train."):
    if %r or info.name in ("silva.train.backend", "silva.train.algorithms", "silva.train.options"):
        importlib.import_module(info.name)
print("torch" in sys.modules)
"""


@pytest.mark.parametrize("all_of_it", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_training_room_imports_without_the_other_rooms(all_of_it: bool) -> None:
    done = subprocess.run([sys.executable, "-c", CODE % all_of_it], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(all_of_it), done.stderr  # the line between run and training needs no torch
