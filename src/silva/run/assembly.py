"""Builds the parts of a run from its options, each owned by one exit stack."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from silva.agent.client import AgentRunner
from silva.agent.environment import parse_agent_env
from silva.codec import TurnCodec
from silva.config.options import RunConfig
from silva.config.parse import write_config_file
from silva.config.validate import check_token_budget
from silva.data.prompts import PromptSource
from silva.data.rows import Dataset, load_dataset
from silva.export.exporter import Exporter
from silva.gateway.app import GatewayApp
from silva.gateway.recorder import Recorder
from silva.gateway.server import GatewayServer
from silva.inference.engine import Engine
from silva.parsers import TurnParser
from silva.processes.sweep import sweep_run
from silva.rollout.driver import AgentSettings, ProcessDriver
from silva.rollout.failure_budget import FailureBudget
from silva.rollout.group_runner import GroupRunner
from silva.rollout.open_sessions import OpenSessions
from silva.run.factories import EngineFactory, RunnerFactory
from silva.run.producer import Producer, ProducerSettings
from silva.run.report import StepReport
from silva.run.settings import (
    group_settings,
    num_threads,
    train_concurrency,
    trained_groups,
)
from silva.run.user_code import UserCode, build_credit, build_rewards, open_user_code
from silva.run.watcher import RunWatcher
from silva.store.ledger import Recovered, RunLedger
from silva.store.media import MEDIA_DIR, MediaStore
from silva.store.queries import check_ledgers, open_run
from silva.turns.session_registry import SessionRegistry
from silva.turns.turn_service import TurnService
from silva.types.clock import Clock, SystemClock
from silva.types.errors import ConfigError

if TYPE_CHECKING:
    from silva.model.config import DecoderConfig

log = logging.getLogger("silva")

TERM_GRACE_S = 5.0
DEFAULT_CONTEXT_LEN = 32768


@dataclass(kw_only=True)
class Runtime:
    """The running parts that every command shares."""

    config: RunConfig
    run_dir: Path
    run_id: str
    clock: Clock
    view: RunWatcher
    codec: TurnCodec
    engine: Engine
    ledger: RunLedger
    registry: SessionRegistry
    turns: TurnService
    exporter: Exporter
    server: GatewayServer
    recovered: Recovered | None
    stack: AsyncExitStack
    user_code: UserCode
    step_numbers: list[Callable[[], dict[str, float]]] = field(default_factory=list)
    """Metrics of a rollout step that parts of the run counted since they were asked last."""


def choose_run_dir(config: RunConfig) -> Path:
    """The run's folder as an absolute path; it may not hold a run yet (the ledger checks that)."""
    name = config.run_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = Path(name).absolute()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run-dir {run_dir} cannot be made: {error.strerror or error}") from error
    return run_dir


def check_accounts(run_dir: Path) -> None:
    """AssertionError where the ledgers of a run that ended well do not add up."""
    with open_run(run_dir) as conn:
        check_ledgers(conn)


def run_id_of(run_dir: Path) -> str:
    """The marker that every process of this run carries: the same after a resume."""
    return "run-" + hashlib.blake2b(str(run_dir.resolve()).encode(), digest_size=8).hexdigest()


def load_prompts(config: RunConfig, path: Path) -> Dataset:
    """A dataset file under this run's keys."""
    dataset = load_dataset(path, config)
    if dataset.num_skipped:
        log.warning("dataset %s: %d broken rows were left out (--skip-bad-rows)", path, dataset.num_skipped)
    if dataset.keys_without_label:
        log.warning(
            "dataset %s: no row has the key %r (--label-key), so every label is None; keys at the top of its rows: %s",
            *(path, config.label_key, ", ".join(map(repr, dataset.keys_without_label))),
        )
    return dataset


def load_codec(config: RunConfig) -> TurnCodec:
    """Tokenizer and chat template of the start model."""
    assert config.hf_checkpoint is not None
    return TurnCodec.load(config.hf_checkpoint, default_template_kwargs=config.apply_chat_template_kwargs)


def load_parser(config: RunConfig, codec: TurnCodec) -> TurnParser:
    """The parser that the options name; `auto` is what the chat template and the tokenizer show."""
    return TurnParser.from_names(
        reasoning=config.agentic_reasoning_parser,
        tool_call=config.agentic_tool_call_parser,
        template=codec.template_source,
        added_tokens=codec.added_tokens,
    )


def build_engine(config: RunConfig, codec: TurnCodec, clock: Clock, *, hf_dir: Path, version: int = 0) -> Engine:
    """The engine that the options name, with the weights of `hf_dir` (a server has its own)."""
    if config.engine == "scripted":
        from silva.inference.scripted import ScriptedEngine, read_script

        assert config.engine_script is not None
        return ScriptedEngine(
            read_script(Path(config.engine_script)),
            codec=codec,
            clock=clock,
            log_path=None if config.engine_log is None else Path(config.engine_log),
            max_context_len=context_limit(config, hf_dir),
        )
    if config.engine == "sglang":
        from silva.inference.sglang import SglangEngine

        return SglangEngine(
            config.engine_url,
            clock=clock,
            timeout_s=config.engine_timeout_s,
            fallback_context_len=context_limit(config, hf_dir),
        )
    from silva.inference.torch_engine import TorchEngine

    check_model(config, hf_dir, vocab_size=codec.vocab_size)
    return TorchEngine(
        hf_dir,
        decode_text=codec.decode,
        stop_ids=codec.stop_ids,
        dtype=config.dtype,
        max_context_len=config.rollout_max_context_len,
        num_slots=config.engine_concurrency,
        num_threads=num_threads(hf_dir),
        seed=config.seed,
        version=version,
    )


def check_model(config: RunConfig, hf_dir: Path, *, vocab_size: int) -> DecoderConfig:
    """The model's shape, where the torch engine can run it with this tokenizer and context; else ConfigError."""
    from silva.model.checkpoint import hf_config_dict
    from silva.model.config import DecoderConfig

    model = DecoderConfig.from_hf(hf_config_dict(hf_dir), where=str(hf_dir / "config.json"))
    if vocab_size > model.vocab_size:
        raise ConfigError(
            f"--hf-checkpoint {hf_dir}: the tokenizer knows {vocab_size} ids, the model only {model.vocab_size}: they "
            "do not belong together"
        )
    asked = config.rollout_max_context_len
    if asked is not None and asked > model.max_positions:
        raise ConfigError(
            f"--rollout-max-context-len is {asked}; the model in {hf_dir} has {model.max_positions} positions"
        )
    return model


def context_limit(config: RunConfig, hf_dir: Path) -> int:
    """Most tokens of a session context: the option, else what config.json says, else a common size."""
    if config.rollout_max_context_len is not None:
        return config.rollout_max_context_len
    try:
        model = json.loads((hf_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return DEFAULT_CONTEXT_LEN  # a folder with a tokenizer alone is enough for a script
    limit = model.get("max_position_embeddings") if isinstance(model, dict) else None
    return limit if isinstance(limit, int) and limit > 1 else DEFAULT_CONTEXT_LEN


def check_row_budget(config: RunConfig) -> None:
    """ConfigError where --max-tokens-per-gpu cannot hold the longest context that the model allows."""
    hf_dir = Path(str(config.hf_checkpoint))
    if (hf_dir / "config.json").is_file():  # a folder without it is refused as a model, by its own name
        check_token_budget(config, context_limit(config, hf_dir), f"the limit of the model in {hf_dir}")


@asynccontextmanager
async def open_runtime(
    config: RunConfig,
    view: RunWatcher,
    run_dir: Path,
    *,
    recover_step: int | None = None,
    engine_dir: Path | None = None,
    version: int = 0,
    open_sessions: bool = False,
    record: Path | None = None,
    user_code: UserCode | None = None,
    engine_factory: EngineFactory | None = None,
) -> AsyncIterator[Runtime]:
    """Ledger, codec, engine and gateway, closed in reverse order. `user_code`: where it is open already.

    `recover_step`: the run is resumed from a checkpoint after that train step (-1: from the start weights); processes
    that an earlier life left behind are ended first. `engine_dir` holds the weights to start with, which are
    `version`.
    """
    run_id, clock = run_id_of(run_dir), SystemClock()
    async with AsyncExitStack() as stack:
        user_code = user_code or await open_user_code(config, run_dir, run_id, stack)
        recovered: Recovered | None = None
        open_ledger = RunLedger if recover_step is None else RunLedger.open_existing
        ledger = open_ledger(run_dir, clock=clock)
        stack.callback(ledger.close)
        await asyncio.to_thread(sweep_run, run_id)
        if recover_step is not None:
            recovered = await asyncio.to_thread(lambda: ledger.recover(step=recover_step))
        write_config_file(config, run_dir / "config.toml")
        codec = await asyncio.to_thread(load_codec, config)
        hf_dir = engine_dir or Path(str(config.hf_checkpoint))
        build = engine_factory or build_engine
        engine = await asyncio.to_thread(lambda: build(config, codec, clock, hf_dir=hf_dir, version=version))
        await engine.start()
        stack.push_async_callback(engine.close)
        exporter = Exporter(config)
        accounts = OpenSessions(ledger, exporter, shared_prefix=config.agentic_shared_prefix) if open_sessions else None
        registry, turns, server = await open_gateway(config, codec, engine, clock, stack, accounts, run_dir, record)
        ledger.event("run_start", {"run_id": run_id, "base_url": server.base_url, "resumed": recovered is not None})
        yield Runtime(
            config=config,
            run_dir=run_dir,
            run_id=run_id,
            clock=clock,
            view=view,
            codec=codec,
            engine=engine,
            ledger=ledger,
            registry=registry,
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

    At the end every session that still lives ends first, then the server stops. `record`: the file that gets each model
    request with its answer.
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


def serving_counters(runtime: Runtime) -> dict[str, float]:
    """Counts of the gateway and the engine since the process started, train and eval together, by metric name."""
    numbers: dict[str, float] = {}
    for name, count in runtime.turns.counters.items():
        kind = name.removeprefix("match_")
        forest = kind != name or name.startswith("repair_")
        numbers[f"forest/{kind}" if forest else f"gateway/{name}"] = float(count)
    for name, count in runtime.exporter.counters.items():
        numbers[f"export/{name}"] = float(count)
    for name, count in runtime.engine.usage().counters.items():
        numbers[f"engine/{name}"] = float(count)
    return numbers


async def open_groups(
    runtime: Runtime, *, credited: bool = False, runner_factory: RunnerFactory = AgentRunner
) -> tuple[GroupRunner, FailureBudget]:
    """The runner process and what runs sessions through it. `credited`: the groups get their credit for training."""
    config = runtime.config
    assert config.agent_command is not None
    runner = runner_factory(run_id=runtime.run_id, grace_s=TERM_GRACE_S, log_path=runtime.run_dir / "runner.log")
    await runner.start()
    runtime.stack.push_async_callback(runner.close)
    settings = AgentSettings(
        command=config.agent_command,
        cwd=Path(config.agent_cwd).absolute(),
        run_dir=runtime.run_dir,
        run_id=runtime.run_id,
        base_url=runtime.server.base_url,
        env=parse_agent_env(config.agent_env),
        env_clear=config.agent_env_clear,
        timeout_s=config.agent_timeout,
        start_timeout_s=config.agent_start_timeout or config.agent_timeout,
    )
    budget = FailureBudget(config.agent_max_failures, runtime.run_dir)
    rewards = build_rewards(config, runtime.user_code, runtime.codec.decode)
    runtime.step_numbers.append(rewards.take_numbers)
    groups = GroupRunner(
        registry=runtime.registry,
        driver=ProcessDriver(runner, settings, runtime.clock, runtime.registry.end, runtime.exporter),
        ledger=runtime.ledger,
        budget=budget,
        rewards=rewards,
        credit=build_credit(config, runtime.user_code) if credited else None,
        on_scored=runtime.view.scored,
    )
    return groups, budget


def build_producer(
    runtime: Runtime, dataset: Dataset, groups: GroupRunner, budget: FailureBudget, *, replace_dropped: bool
) -> Producer:
    """Rollout steps over the prompt data, from where a resumed run stands."""
    config, recovered = runtime.config, runtime.recovered
    assert config.rollout_batch_size is not None
    pending = [] if recovered is None else recovered.pending
    source = PromptSource(
        dataset,
        num_epoch=config.num_epoch,
        shuffle=config.rollout_shuffle,
        seed=config.rollout_seed,
        next_position=0 if recovered is None else recovered.next_position,
        pending=(prompt.position for prompt in pending),
    )
    for prompt in pending:
        source.check_place(position=prompt.position, epoch=prompt.epoch, row=prompt.row)
    return Producer(
        source=source,
        groups=groups,
        ledger=runtime.ledger,
        budget=budget,
        settings=ProducerSettings(
            batch_size=config.rollout_batch_size, concurrency=train_concurrency(config), replace=replace_dropped
        ),
        group_settings=trained_groups(config) if replace_dropped else group_settings(config, "train"),
        issued={prompt.prompt_id: prompt.num_groups for prompt in pending},
        on_step=runtime.view.begin_step,
    )


def build_report(runtime: Runtime) -> StepReport:
    """What closes the accounts of a step."""
    return StepReport(
        run_dir=runtime.run_dir,
        ledger=runtime.ledger,
        dump_path=runtime.config.save_debug_rollout_data,
        counters=lambda: {**serving_counters(runtime), **_step_numbers(runtime)},
    )


def _step_numbers(runtime: Runtime) -> dict[str, float]:
    return {name: value for numbers in runtime.step_numbers for name, value in numbers().items()}
