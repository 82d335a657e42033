"""`silva reexport`: the samples of a run built anew from its ledger."""

from __future__ import annotations

import argparse
from pathlib import Path

from silva.cli.loop import run_async
from silva.config import read_config_file, resolve
from silva.run import reexport
from silva.store import open_run, to_json
from silva.view import render_summary


def run(args: argparse.Namespace) -> int:
    return run_async(lambda: _reexport(args))


async def _reexport(args: argparse.Namespace) -> None:
    run_dir = Path(args.recorded)
    with open_run(run_dir):  # a folder without a ledger is refused as such, before its options are missed
        config = resolve(args, base=read_config_file(run_dir / "config.toml"))
    summary = await reexport(config, run_dir, out=args.out, force=args.force)
    print(to_json(summary) if args.json else render_summary(summary))
