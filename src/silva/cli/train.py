"""`silva train`: the main job."""

from __future__ import annotations

import argparse
from pathlib import Path

from silva.cli.loop import run_async
from silva.config import resolve
from silva.run import open_run, saved_options
from silva.view import RunView


def run(args: argparse.Namespace) -> int:
    base = None if args.resume is None else saved_options(Path(args.resume))
    job = open_run(resolve(args, base=base), resume=args.resume)
    prepared = job.check("train")
    with RunView(job.run_dir / "run.log") as job.watcher:
        return run_async(lambda: job.train(prepared))
