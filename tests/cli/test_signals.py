"""Signals: one ends a command in order, more do not cut the clean-up short."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal

import pytest

from silva.cli.loop import run_async
from silva.cli.main import main


@pytest.mark.parametrize(("first", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_later_signals_leave_the_clean_up_alone(first: signal.Signals, status: int) -> None:
    cleaned: list[int] = []

    async def command() -> int:
        try:
            os.kill(os.getpid(), first)
            await asyncio.Event().wait()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.01)
                cleaned.append(number)
        return 0

    assert run_async(command) == status
    assert len(cleaned) == 3


def test_an_interrupt_while_a_command_is_loaded_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["show", "nowhere"]) == 130
