"""Looks at everything that a run needs before it runs: one finding per check."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Literal

from silva.agent import AgentRunner, withheld_names
from silva.config import (
    EvalSet,
    RunConfig,
    eval_sets,
    is_group_of_one,
    needs_reference,
    one_context_reason,
    several_contexts_problem,
    training_warnings,
    trains_on_records,
    validate,
)
from silva.data import Dataset, PromptSource
from silva.judge import GroupResult
from silva.run.assembly import open_groups
from silva.run.parts import build_engine, check_model, check_row_budget, load_codec, load_parser, load_prompts
from silva.run.runtime import open_runtime
from silva.run.settings import group_settings
from silva.run.setup import RunSetup
from silva.run.side_models import look_at_side_models
from silva.run.user_code import open_user_code
from silva.types import SilvaError, SystemClock

PROBE_ANSWER = "ok"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one check found.

    Example: `Finding(status="FAIL", name="dataset", text="rows.jsonl line 3: ...")` prints as
    `FAIL dataset: rows.jsonl line 3: ...`
    """

    status: Literal["PASS", "FAIL", "WARN", "SKIP"]
    """SKIP: not checked, because an earlier check failed."""
    name: str
    """What was checked."""
    text: str = ""
    """What was seen, or the reason."""

    def __str__(self) -> str:
        return f"{self.status} {self.name}" + (f": {self.text}" if self.text else "")


@dataclass(eq=False)
class Checks:
    """Runs the checks that the options ask for; each finding goes to `say` as soon as it is there.

    `say` also gets the table of the chat template's transitions, as a text.
    """

    config: RunConfig
    """The options."""
    say: Callable[[object], None]
    """Receives one line per check."""
    _: KW_ONLY
    agent_run: bool = True
    """Run one real session."""

    def __post_init__(self) -> None:
        self.failed = False
        """A check failed so far."""

    async def run(self) -> None:
        """Do all checks. What a check finds is not raised."""
        config = self.config
        options_fit = await self._do("options", _check_options(config))
        for warning in training_warnings(config):
            self.say(Finding(status="WARN", name="options", text=warning))
        datasets: list[Dataset] = []
        if config.prompt_data is not None:
            await self._do("dataset", _check_dataset(config, Path(config.prompt_data), datasets))
        for item in _eval_sets(config):
            await self._do(f"dataset {item.name}", _check_dataset(config, item.path, []))
        if config.hf_checkpoint is not None:
            await self._check_models(options_fit)
        if any((config.custom_rm_path, config.agentic_custom_advantage_path, config.custom_tis_function_path)):
            await self._do("your functions", _check_user_code(config))
        if self.agent_run and options_fit and datasets and not self.failed:
            await self._do("agent command", _check_agent(config, datasets[0]))
        elif self.agent_run:
            self.say(Finding(status="SKIP", name="agent command", text="the checks above must pass first"))

    async def _check_models(self, options_fit: bool) -> None:
        config = self.config
        if await self._do("chat template", self._check_template()):
            await self._do("parsers", _check_parsers(config))
        if config.engine == "torch":
            await self._do("model", _check_model(config))
        if config.engine == "sglang" and options_fit:
            await self._do("engine", _check_servers(config))
        elif config.engine == "sglang":
            self.say(Finding(status="SKIP", name="engine", text="the options must pass first"))
        if options_fit and (needs_reference(config) or config.opd_teacher is not None):
            await self._do("reference and teacher", _check_side_models(config))

    async def _do(self, name: str, check: Awaitable[str]) -> bool:
        """Do one check: it returns what was seen, or raises SilvaError with the reason."""
        try:
            seen = await check
        except SilvaError as error:
            self.failed = True
            self.say(Finding(status="FAIL", name=name, text=str(error)))
            return False
        self.say(Finding(status="PASS", name=name, text=seen))
        return True

    async def _check_template(self) -> str:
        report = load_codec(self.config).check()
        self.say(report)
        if not report.ok:
            raise SilvaError("the tokenizer or the chat template failed its proof; see the table above")
        return "proven; transitions as in the table above"


async def _check_options(config: RunConfig) -> str:
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


def _eval_sets(config: RunConfig) -> list[EvalSet]:
    try:
        return eval_sets(config)
    except SilvaError:
        return []  # the check of the options reports it


async def _check_dataset(config: RunConfig, path: Path, found: list[Dataset]) -> str:
    dataset = load_prompts(config, path)
    found.append(dataset)
    skipped = f", {dataset.num_skipped} broken rows left out" if dataset.num_skipped else ""
    return f"{path}: {len(dataset.rows)} rows{skipped}"


async def _check_parsers(config: RunConfig) -> str:
    return str(load_parser(config, load_codec(config)))


async def _check_model(config: RunConfig) -> str:
    where = Path(str(config.hf_checkpoint))
    model = check_model(config, where, vocab_size=load_codec(config).vocab_size)
    return f"{where}: the torch engine can run it, context {model.max_positions} tokens"


async def _check_servers(config: RunConfig) -> str:
    engine = build_engine(config, load_codec(config), SystemClock(), hf_dir=Path(str(config.hf_checkpoint)))
    await engine.start()
    await engine.close()
    return f"{', '.join(config.engine_url)}: weight version {engine.version}, context {engine.max_context_len} tokens"


async def _check_side_models(config: RunConfig) -> str:
    return "; ".join(await look_at_side_models(config))


async def _check_user_code(config: RunConfig) -> str:
    with tempfile.TemporaryDirectory(prefix="silva-check-") as folder:
        async with AsyncExitStack() as stack:
            await open_user_code(config, Path(folder), f"check-{os.getpid()}", stack, trains=True)
    loaded: list[str] = []
    if config.custom_rm_path is not None:
        loaded.append(config.custom_rm_path + (" (called once a group)" if config.group_rm else ""))
    if config.agentic_custom_advantage_path is not None:
        loaded.append(f"{config.agentic_custom_advantage_path} (credit; not called by this check)")
    if config.custom_tis_function_path is not None:
        loaded.append(f"{config.custom_tis_function_path} (weights; not called by this check)")
    return f"loaded {', '.join(loaded)}"


async def _check_agent(config: RunConfig, dataset: Dataset) -> str:
    """One real session on the first row; a fixed text replaces the model unless a script is configured."""
    with tempfile.TemporaryDirectory(prefix="silva-check-") as folder, _silent_log():
        run_dir = Path(folder) / "run"
        run_dir.mkdir()
        model = "the script answered"
        if config.engine != "scripted":
            model = "the model was a fixed text"
            script = Path(folder) / "script.jsonl"
            script.write_text(json.dumps({"text": PROBE_ANSWER}) + "\n", encoding="utf-8")
            config = replace(config, engine="scripted", engine_script=str(script))
        result = await _probe(replace(config, agent_retries=0), dataset, run_dir)
        return _verdict(model, result, one_context_reason(config))


@contextmanager
def _silent_log() -> Iterator[None]:
    """The probe is a whole run, whose own messages belong to no check."""
    logger = logging.getLogger("silva")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


async def _probe(config: RunConfig, dataset: Dataset, run_dir: Path) -> GroupResult:
    setup = RunSetup(
        config=config, run_dir=run_dir, resumed=False, engine_factory=build_engine, runner_factory=AgentRunner
    )
    async with open_runtime(setup) as runtime:
        groups, _ = await open_groups(runtime)
        prompt = PromptSource(dataset, num_epoch=1, shuffle=False, seed=0).take()
        assert prompt is not None
        runtime.ledger.issue_prompt(prompt.prompt_id, dataset="train", epoch=0, row=prompt.row, position=0)
        settings = replace(group_settings(config, "train"), num_samples=1, min_size=1, num_retries=0)
        return await groups.run(prompt, settings, start_step=0)


def _verdict(model: str, result: GroupResult, refusal: str | None) -> str:
    """What a session showed. `refusal`: why silva train refuses several contexts of a session."""
    for failure in result.failures:
        raise SilvaError(f"{failure.reason}: {failure.message}")
    if result.end is not None:
        raise SilvaError(f"{result.end.reason}: {result.end}")
    sample = result.samples[0]
    reward = "none" if sample.reward is None else f"{sample.reward:g}"
    several = len(result.samples)
    contexts = f"{several} contexts, the first with " if several > 1 else ""
    shown = f"{contexts}model turns: {sample.num_turns}, exit status 0, reward {reward} ({model})"
    return shown if several == 1 or refusal is None else f"{shown}; not for silva train: {refusal}"
