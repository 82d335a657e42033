"""`silva check`: look before a run. Each line is PASS, FAIL, WARN or SKIP with the reason."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from silva.agent.environment import withheld_names
from silva.cli.loop import run_async
from silva.cli.replay import run_replay
from silva.config.options import RunConfig
from silva.config.parse import resolve
from silva.config.validate import eval_sets, one_context_reason, several_contexts_problem, trains_on_records, validate
from silva.config.validate_training import is_group_of_one, needs_reference, training_warnings
from silva.data.prompts import PromptSource
from silva.data.rows import Dataset
from silva.judge.group_end import GroupResult
from silva.model.torch_env import prepare
from silva.run.assembly import (
    build_engine,
    check_model,
    check_row_budget,
    load_codec,
    load_parser,
    load_prompts,
    open_groups,
    open_runtime,
)
from silva.run.settings import group_settings
from silva.run.side_models import look_at_side_models
from silva.run.user_code import open_user_code
from silva.types.clock import SystemClock
from silva.types.errors import ConfigError, SilvaError
from silva.view.console import RunView

PROBE_ANSWER = "ok"


class Checklist:
    """Prints one line a check and remembers whether any failed."""

    def __init__(self) -> None:
        self.failed = False

    def run(self, name: str, check: Callable[[], str | None]) -> bool:
        """Do one check: it returns what was seen, or raises SilvaError with the reason."""
        try:
            seen = check()
        except SilvaError as error:
            self.failed = True
            print(f"FAIL {name}: {error}", flush=True)
            return False
        print(f"PASS {name}" + (f": {seen}" if seen else ""), flush=True)
        return True


def run(args: argparse.Namespace) -> int:
    if args.replay is not None:
        return run_replay(args)
    if args.json:
        raise ConfigError("--json goes with --replay FILE")
    prepare()
    checks = Checklist()
    config = resolve(args)
    options_fit = checks.run("options", lambda: _check_options(config))
    for warning in training_warnings(config):
        print(f"WARN options: {warning}", flush=True)
    datasets: list[Dataset] = []
    if config.prompt_data is not None:
        checks.run("dataset", lambda: _check_dataset(config, Path(config.prompt_data or ""), datasets))
    for item in _eval_sets(config):
        checks.run(f"dataset {item.name}", lambda path=item.path: _check_dataset(config, path, []))
    if config.hf_checkpoint is not None:
        if checks.run("chat template", lambda: _check_template(config)):
            checks.run("parsers", lambda: str(load_parser(config, load_codec(config))))
        if config.engine == "torch":
            checks.run("model", lambda: _check_model(config))
        if config.engine == "sglang" and options_fit:
            checks.run("engine", lambda: _check_servers(config))
        elif config.engine == "sglang":
            print("SKIP engine: the options must pass first", flush=True)
        if options_fit and (needs_reference(config) or config.opd_teacher is not None):
            checks.run("reference and teacher", lambda: _check_side_models(config))
    if any((config.custom_rm_path, config.agentic_custom_advantage_path, config.custom_tis_function_path)):
        checks.run("your functions", lambda: _check_user_code(config))
    if options_fit and datasets and not checks.failed and not args.no_agent_run:
        checks.run("agent command", lambda: _check_agent(config, datasets[0]))
    elif not args.no_agent_run:
        print("SKIP agent command: the checks above must pass first", flush=True)
    return 1 if checks.failed else 0


def _check_options(config: RunConfig) -> str:
    reason = ""
    if trains_on_records(config):
        validate(config, "train")
        return "fit for silva train on recorded rollouts"
    if config.engine == "sglang" and not config.debug_rollout_only:
        reason = "silva train needs another --engine"
    elif (problem := several_contexts_problem(config)) is not None:
        reason = f"not for silva train: {problem}"
    elif is_group_of_one(config):
        reason = (
            f"silva train needs at least 2 samples a prompt with --advantage-estimator {config.advantage_estimator}"
        )
    command = "rollout" if reason else "train"
    validate(config, command)
    if command == "train":
        check_row_budget(config)
    withheld = withheld_names()
    shown = f"; not given to agents: {', '.join(withheld)}" if withheld and not config.agent_env_clear else ""
    only = f" ({reason})" if reason else ""
    return f"fit for silva {command}{only}{shown}"


def _eval_sets(config: RunConfig):
    try:
        return eval_sets(config)
    except SilvaError:
        return []  # told by the options check


def _check_dataset(config: RunConfig, path: Path, found: list[Dataset]) -> str:
    dataset = load_prompts(config, path)
    found.append(dataset)
    skipped = f", {dataset.num_skipped} broken rows left out" if dataset.num_skipped else ""
    return f"{path}: {len(dataset.rows)} rows{skipped}"


def _check_template(config: RunConfig) -> str:
    report = load_codec(config).check()
    print(str(report), flush=True)
    if not report.ok:
        raise SilvaError("the tokenizer or the chat template failed its proof; see the table above")
    return "proven; transitions as in the table above"


def _check_model(config: RunConfig) -> str:
    where = Path(str(config.hf_checkpoint))
    model = check_model(config, where, vocab_size=load_codec(config).vocab_size)
    return f"{where}: the torch engine can run it, context {model.max_positions} tokens"


def _check_servers(config: RunConfig) -> str:
    engine = build_engine(config, load_codec(config), SystemClock(), hf_dir=Path(str(config.hf_checkpoint)))

    async def look() -> int:
        await engine.start()
        await engine.close()
        return 0

    run_async(look)
    return f"{', '.join(config.engine_url)}: weight version {engine.version}, context {engine.max_context_len} tokens"


def _check_side_models(config: RunConfig) -> str:
    told: list[str] = []

    async def look() -> int:
        told.extend(await look_at_side_models(config))
        return 0

    run_async(look)
    return "; ".join(told)


def _check_user_code(config: RunConfig) -> str:
    async def look() -> int:
        async with AsyncExitStack() as stack:
            await open_user_code(config, Path(folder), f"check-{os.getpid()}", stack, trains=True)
        return 0

    with tempfile.TemporaryDirectory(prefix="silva-check-") as folder:
        run_async(look)
    loaded: list[str] = []
    if config.custom_rm_path is not None:
        loaded.append(config.custom_rm_path + (" (called once a group)" if config.group_rm else ""))
    if config.agentic_custom_advantage_path is not None:
        loaded.append(f"{config.agentic_custom_advantage_path} (credit; not called by this check)")
    if config.custom_tis_function_path is not None:
        loaded.append(f"{config.custom_tis_function_path} (weights; not called by this check)")
    return f"loaded {', '.join(loaded)}"


def _check_agent(config: RunConfig, dataset: Dataset) -> str:
    """One real session on the first row; a fixed text stands for the model unless a script is configured."""
    with tempfile.TemporaryDirectory(prefix="silva-check-") as folder:
        run_dir = Path(folder) / "run"
        run_dir.mkdir()
        model = "the script answered"
        if config.engine != "scripted":
            model = "the model was a fixed text"
            script = Path(folder) / "script.jsonl"
            script.write_text(json.dumps({"text": PROBE_ANSWER}) + "\n", encoding="utf-8")
            config = replace(config, engine="scripted", engine_script=str(script))
        results: list[GroupResult] = []
        with RunView(run_dir / "run.log", quiet=True) as view:
            run_async(lambda: _probe(replace(config, agent_retries=0), dataset, run_dir, view, results))
        return _verdict(model, results, one_context_reason(config))


async def _probe(config: RunConfig, dataset: Dataset, run_dir: Path, view: RunView, results: list[GroupResult]) -> int:
    async with open_runtime(config, view, run_dir) as runtime:
        groups, _ = await open_groups(runtime)
        prompt = PromptSource(dataset, num_epoch=1, shuffle=False, seed=0).take()
        assert prompt is not None
        runtime.ledger.issue_prompt(prompt.prompt_id, dataset="train", epoch=0, row=prompt.row, position=0)
        settings = replace(group_settings(config, "train"), num_samples=1, min_size=1, num_retries=0)
        results.append(await groups.run(prompt, settings, rollout_id=0))
    return 0


def _verdict(model: str, results: list[GroupResult], refusal: str | None) -> str:
    """What a session showed. `refusal`: why silva train would not take several contexts of it."""
    if not results:
        raise SilvaError("it was stopped before it ended")
    for failure in results[0].failures:
        raise SilvaError(f"{failure.reason}: {failure.message}")
    if results[0].end is not None:
        raise SilvaError(f"{results[0].end.reason}: {results[0].end}")
    sample = results[0].samples[0]
    reward = "none" if sample.reward is None else f"{sample.reward:g}"
    several = len(results[0].samples)
    contexts = f"{several} contexts, the first with " if several > 1 else ""
    shown = f"{contexts}model turns: {sample.num_turns}, exit status 0, reward {reward} ({model})"
    return shown if several == 1 or refusal is None else f"{shown}; not for silva train: {refusal}"
