"""`silva rollout`: run agents and deliver their samples, without training."""

from __future__ import annotations

import argparse

from silva.cli.loop import run_async
from silva.config import resolve
from silva.run import open_run
from silva.view import RunView


def run(args: argparse.Namespace) -> int:
    job = open_run(resolve(args))
    prepared = job.check("rollout")
    with RunView(job.run_dir / "run.log") as job.watcher:
        return run_async(lambda: job.rollout(prepared))
