"""`silva serve`: the model API and an engine alone."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path

from silva.cli.loop import run_async
from silva.config.options import RunConfig
from silva.config.parse import resolve
from silva.config.validate import validate
from silva.gateway.server import require_loopback
from silva.model.torch_env import prepare
from silva.run.assembly import choose_run_dir, open_runtime
from silva.types.errors import ConfigError
from silva.view.console import RunView

_STOPPED = (130, 143)
"""A signal is the ordinary way to end a server."""


def run(args: argparse.Namespace) -> int:
    config = resolve(args)
    validate(config, "serve")
    if not args.open_sessions:
        raise ConfigError(
            "silva serve needs --open-sessions: without it no client could ever get a session, since only a rollout "
            "opens them"
        )
    require_loopback(config.gateway_host)
    run_dir = choose_run_dir(config)
    prepare(decodes=config.engine == "torch")
    with RunView(run_dir / "run.log") as view:
        record = None if args.record is None else Path(args.record)
        status = run_async(lambda: _serve(replace(config, run_dir=str(run_dir)), view, run_dir, record))
    return 0 if status in _STOPPED else status


async def _serve(config: RunConfig, view: RunView, run_dir: Path, record: Path | None) -> int:
    async with open_runtime(config, view, run_dir, open_sessions=True, record=record) as runtime:
        print(f"silva serve: ready base_url={runtime.server.base_url}", flush=True)
        await asyncio.Event().wait()
    return 0
