"""Tests with real agent programs. Off unless SILVA_HARNESS=1: the programs take 2 GB and minutes to install."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("SILVA_HARNESS") == "1":
        return
    off = [item for item in items if item.get_closest_marker("harness")]
    config.hook.pytest_deselected(items=off)
    items[:] = [item for item in items if item not in off]
