"""`silva check`: look before a run. Each line is PASS, FAIL, WARN or SKIP with the reason."""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

from silva.cli.loop import run_async
from silva.config import RunConfig, resolve
from silva.model import prepare
from silva.run import Checks, replay_recording
from silva.types import ConfigError
from silva.view import render_replay


def run(args: argparse.Namespace) -> int:
    if args.json and args.replay is None:
        raise ConfigError("--json goes with --replay FILE")
    config = resolve(args)
    if args.replay is not None:
        return run_async(lambda: _replay(config, args))
    prepare()
    checks = Checks(config, functools.partial(print, flush=True), agent_run=not args.no_agent_run)
    return run_async(checks.run) or int(checks.failed)


async def _replay(config: RunConfig, args: argparse.Namespace) -> int:
    document = await replay_recording(config, Path(args.replay))
    print(json.dumps(document, indent=2) if args.json else render_replay(document), end="\n" if args.json else "")
    return 0 if document["linear"] else 1
