"""`silva serve`: the model API and an engine alone."""

from __future__ import annotations

import argparse
from pathlib import Path

from silva.cli.loop import run_async
from silva.config import resolve
from silva.run import open_run
from silva.types import ConfigError
from silva.view import RunView

_STOPPED = (130, 143)
"""A signal is the ordinary way to end a server."""


def run(args: argparse.Namespace) -> int:
    config = resolve(args)
    if not args.open_sessions:
        raise ConfigError(
            "silva serve needs --open-sessions: without it no client could ever get a session, since only a rollout "
            "opens them"
        )
    job = open_run(config)
    prepared = job.check("serve")
    record = None if args.record is None else Path(args.record)
    with RunView(job.run_dir / "run.log") as job.watcher:
        status = run_async(lambda: job.serve(record=record, ready=_print, prepared=prepared))
    return 0 if status in _STOPPED else status


def _print(base_url: str) -> None:
    print(f"silva serve: ready base_url={base_url}", flush=True)
