"""What runs while a run runs: ledger, codec, engine and gateway, each owned by one exit stack."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from silva.codec import TurnCodec
from silva.config import RunConfig, write_config_file
from silva.export import Exporter
from silva.gateway import GatewayApp, GatewayServer, Recorder
from silva.inference import Engine
from silva.processes import sweep_run
from silva.rollout import Leases, OpenSessions
from silva.run.parts import load_codec, load_parser, run_id_of
from silva.run.setup import RunSetup
from silva.run.user_code import UserCode, open_user_code
from silva.store import MEDIA_DIR, MediaStore, Recovered, RunLedger, check_ledgers, open_run
from silva.turns import SessionRegistry, TurnService
from silva.types import Clock, SystemClock

log = logging.getLogger("silva")


@dataclass(kw_only=True)
class Runtime:
    """The running parts that every job of a run shares."""

    setup: RunSetup
    """Options, folder, and what the caller replaces."""
    run_id: str
    """The marker that every process of this run carries."""
    clock: Clock
    """The time of all waits."""
    codec: TurnCodec
    """Tokenizer and chat template."""
    engine: Engine
    """Samples; started."""
    ledger: RunLedger
    """The account of prompts, sessions and turns."""
    registry: SessionRegistry
    """The live sessions."""
    leases: Leases
    """Which sessions may run now."""
    turns: TurnService
    """Answers the model requests of sessions."""
    exporter: Exporter
    """Makes samples of ended sessions."""
    server: GatewayServer
    """The model API over HTTP; started."""
    recovered: Recovered | None
    """What a resumed run continues with; None in a new run."""
    stack: AsyncExitStack
    """Closes what is opened on top of the runtime, before the runtime itself."""
    user_code: UserCode
    """The user functions that the options name."""
    step_numbers: list[Callable[[], dict[str, float]]] = field(default_factory=list)
    """Each returns the metrics of a rollout step that it counted since its last call."""

    @property
    def config(self) -> RunConfig:
        return self.setup.config

    @property
    def run_dir(self) -> Path:
        return self.setup.run_dir


def check_accounts(run_dir: Path) -> None:
    """Raise AssertionError where the ledgers of a run that ended well do not add up."""
    with open_run(run_dir) as conn:
        check_ledgers(conn)


@asynccontextmanager
async def open_runtime(
    setup: RunSetup,
    *,
    recover_step: int | None = None,
    engine_dir: Path | None = None,
    version: int = 0,
    open_sessions: bool = False,
    record: Path | None = None,
    user_code: UserCode | None = None,
) -> AsyncIterator[Runtime]:
    """Ledger, codec, engine and gateway, closed in reverse order. `user_code`: where it is open already.

    `recover_step`: the run is resumed from a checkpoint after that train step (-1: from the start weights); processes
    that the run left behind before are ended first. `engine_dir` contains the weights to start with, which are
    `version`.
    """
    config, run_dir = setup.config, setup.run_dir
    run_id, clock = run_id_of(run_dir), SystemClock()
    async with AsyncExitStack() as stack:
        user_code = user_code or await open_user_code(config, run_dir, run_id, stack)
        open_ledger = RunLedger if recover_step is None else RunLedger.open_existing
        ledger = open_ledger(run_dir, clock=clock)
        stack.callback(ledger.close)
        await asyncio.to_thread(sweep_run, run_id)
        recovered = None if recover_step is None else await asyncio.to_thread(ledger.recover, train_step=recover_step)
        write_config_file(config, run_dir / "config.toml")
        codec = await asyncio.to_thread(load_codec, config)
        hf_dir = engine_dir or Path(str(config.hf_checkpoint))
        engine = await asyncio.to_thread(setup.engine_factory, config, codec, clock, hf_dir=hf_dir, version=version)
        await engine.start()
        stack.push_async_callback(engine.close)
        exporter, leases = Exporter(config), Leases(engine)
        shared_prefix = config.agentic_shared_prefix
        accounts = OpenSessions(ledger, leases, exporter, shared_prefix=shared_prefix) if open_sessions else None
        registry, turns, server = await open_gateway(config, codec, engine, clock, stack, accounts, run_dir, record)
        ledger.event("run_start", {"run_id": run_id, "base_url": server.base_url, "resumed": recovered is not None})
        yield Runtime(
            setup=setup,
            run_id=run_id,
            clock=clock,
            codec=codec,
            engine=engine,
            ledger=ledger,
            registry=registry,
            leases=leases,
            turns=turns,
            exporter=exporter,
            server=server,
            recovered=recovered,
            stack=stack,
            user_code=user_code,
        )
        ledger.event("run_end")
        await asyncio.to_thread(ledger.flush)
        await asyncio.to_thread(check_accounts, run_dir)


async def open_gateway(
    config: RunConfig,
    codec: TurnCodec,
    engine: Engine,
    clock: Clock,
    stack: AsyncExitStack,
    accounts: OpenSessions | None,
    run_dir: Path,
    record: Path | None = None,
) -> tuple[SessionRegistry, TurnService, GatewayServer]:
    """Sessions, turns and the HTTP server.

    At the end every live session ends first, then the server stops. `record`: a file to which each model request is
    appended with its answer.
    """
    parser, media = load_parser(config, codec), MediaStore(run_dir / MEDIA_DIR)
    log.info("parsers: %s", parser)
    turns = TurnService(engine=engine, codec=codec, parser=parser, clock=clock, options=config, media=media)
    stack.callback(turns.close)
    registry = SessionRegistry(
        engine,
        clock,
        open_sessions=accounts is not None,
        on_open=None if accounts is None else accounts.opened,
        on_finish=None if accounts is None else accounts.finish,
    )

    async def end_sessions() -> None:
        for session in await registry.close():
            if accounts is not None:
                await accounts.cancel(session)

    app: GatewayApp | Recorder = GatewayApp(registry, turns, clock, config)
    if record is not None:
        app = Recorder(app, record)
        stack.callback(app.close)
    server = GatewayServer(app, config)
    await server.start()
    stack.push_async_callback(server.close)
    stack.push_async_callback(end_sessions)
    return registry, turns, server
