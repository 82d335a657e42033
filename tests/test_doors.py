"""Rooms have doors: other rooms import only what a room's `__all__` names, or a module that is a door of its own."""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import silva

SRC = Path(silva.__file__).parent
ROOMS = sorted(path.parent.name for path in SRC.glob("*/__init__.py"))
OWN_DOORS = {
    "inference": {"sglang", "sglang_http", "sglang_scorer", "torch_engine"},
    "model": {"decoder", "folder_weights"},
    "processes": {"runner", "user_worker"},
    "train": {
        *("advantages", "attention", "corrections", "critic", "custom_tis", "learner", "losses", "objective"),
        *("optimizer", "packed_model", "packing", "policy", "side_scores"),
    },
}
"""Modules that import torch or aiohttp, or that are programs of child processes: nobody else pays for them."""


def imports(path: Path) -> Iterator[ast.ImportFrom]:
    """What a file imports from silva, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("silva."):
            yield node


def test_other_rooms_come_through_the_door() -> None:
    faults: list[str] = []
    for path in sorted(SRC.rglob("*.py")):
        mine = path.relative_to(SRC).parts[0]
        for node in imports(path):
            _, room, *inside = str(node.module).split(".")
            if room == mine or room not in ROOMS:
                continue
            where = f"{path.relative_to(SRC)}:{node.lineno}"
            if inside and inside[0] not in OWN_DOORS.get(room, ()):
                faults.append(f"{where} goes past the door of {room}: {node.module}")
            elif not inside:
                named = importlib.import_module(f"silva.{room}").__all__
                faults += [
                    f"{where}: {room} does not name {item.name}" for item in node.names if item.name not in named
                ]
    assert faults == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_door_says_what_the_room_is_for_and_names_what_may_be_touched(room: str) -> None:
    module = importlib.import_module(f"silva.{room}")
    head = (module.__doc__ or "").strip().splitlines()
    assert 5 <= len(head) <= 15, f"the docstring of {room} has {len(head)} lines"
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert [name for name, number in Counter(module.__all__).items() if number > 1] == []


def test_no_two_public_classes_share_a_name() -> None:
    found = Counter(
        node.name
        for path in SRC.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, number in found.items() if number > 1] == []
