"""Fixtures for every test folder. Helpers live in tests/support."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent / "support"))

from chatml_dir import build_chatml_dir

from silva.codec import TurnCodec

# The same examples in every run, and no clock: a slow machine is no fault. HYPOTHESIS_PROFILE=explore finds new ones.
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


@pytest.fixture(scope="session")
def chatml_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder with a plain ChatML template."""
    return build_chatml_dir(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(scope="session")
def codec(chatml_dir: Path) -> TurnCodec:
    return TurnCodec.load(chatml_dir)


@pytest.fixture(scope="session")
def thinking_codec(tmp_path_factory: pytest.TempPathFactory) -> TurnCodec:
    """A template that opens each answer inside `<think>`."""
    return TurnCodec.load(build_chatml_dir(tmp_path_factory.mktemp("thinking"), prefill_think=True))


@pytest.fixture(scope="session")
def forgetful_codec(tmp_path_factory: pytest.TempPathFactory) -> TurnCodec:
    """A template that drops the reasoning of earlier turns."""
    return TurnCodec.load(build_chatml_dir(tmp_path_factory.mktemp("forgetful"), drops_old_reasoning=True))
