"""What is logged and written at the end of each rollout step: the accounting line, the dump, and counts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from silva.store import (
    Counts,
    RunLedger,
    accounting,
    accounting_line,
    check_dump_template,
    counts,
    engine_busy,
    gateway_numbers,
    open_run,
    roots_per_session,
    start_lag,
    write_rollout_dump,
)
from silva.types import spread

log = logging.getLogger("silva.rollout")


@dataclass(kw_only=True, eq=False)
class StepReport:
    """Closes the accounts of a rollout step.

    Waits until the ledger has all that was queued, so that the numbers are those of the ledger. `dump_path` contains
    `{rollout_id}`, or is None for no dump.
    """

    run_dir: Path
    """The run's folder."""
    ledger: RunLedger
    """Flushed before anything is counted."""
    dump_path: str | None
    """Path with {rollout_id}; None for no dump."""
    counters: Callable[[], dict[str, float]] = dict
    """Counts that other parts of the run made since they were asked last."""

    def __post_init__(self) -> None:
        if self.dump_path is not None:
            check_dump_template(self.dump_path)

    async def finish(self, rollout_id: int) -> dict[str, float]:
        """Log the line `AGENTIC ROLLOUT event=accounting_end ...`, write the dump; returns counts for the metrics."""
        await asyncio.wrap_future(self.ledger.flush_future())
        numbers = await asyncio.to_thread(self._close_accounts, rollout_id)
        return {**self.counters(), **numbers}

    def _close_accounts(self, rollout_id: int) -> dict[str, float]:
        with open_run(self.run_dir) as conn:
            account = accounting(conn, rollout_id)
            numbers = _ledger_numbers(counts(conn))
            roots = roots_per_session(conn, rollout_id)
            numbers |= spread("forest/num_root", [float(number) for number in roots]) if roots else {}
            numbers |= gateway_numbers(conn, rollout_id) | start_lag(conn, rollout_id)
            if (busy := engine_busy(conn, rollout_id)) is not None:
                numbers["perf/engine_busy"] = busy
            if self.dump_path is not None:
                write_rollout_dump(self.dump_path, rollout_id, conn)
        log.info("%s", accounting_line(rollout_id, account))
        if account["failed"]:
            reasons = ", ".join(f"{reason} {number}" for reason, number in account["failures"].items())
            log.warning(
                "step %d: %d of %d sessions failed (%s); look closer with: silva show %s",
                *(rollout_id, account["failed"], account["sessions"], reasons, self.run_dir),
            )
        return numbers


def _ledger_numbers(document: Counts) -> dict[str, float]:
    """`ledger/<state>[/<reason>]` of prompts and `ledger/sessions/<status>[/<reason>]` of sessions, over the whole
    run.
    """
    numbers: dict[str, float] = {}
    for table, prefix in ((document["prompts"], "ledger"), (document["sessions"], "ledger/sessions")):
        for state, reasons in table.items():
            for reason, count in reasons.items():
                name = f"{prefix}/{state}" if reason == "none" else f"{prefix}/{state}/{reason}"
                numbers[name] = float(count)
    return numbers
