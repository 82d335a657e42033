"""What can be refused before anything starts: options, datasets, the run that is to be resumed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from silva.config import (
    Command,
    RunConfig,
    check_training_run,
    eval_sets,
    read_config_file,
    trains_on_records,
    validate,
)
from silva.data import Dataset, PromptSource
from silva.gateway import require_loopback
from silva.model import prepare
from silva.run.parts import check_row_budget, load_prompts, make_run_dir
from silva.run.setup import RunSetup
from silva.store import counts, open_run, pending_places
from silva.types import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The datasets of a run whose options passed their checks."""

    prompts: Dataset | None = None
    """The rows to roll out; None where a run needs none."""
    evals: dict[str, Dataset] = field(default_factory=dict[str, Dataset])
    """Held-out rows by name."""
    num_rollout: int | None = None
    """Rollout steps of the whole run, as far as options and data show; None where they do not."""


def prepare_run(setup: RunSetup, command: Command) -> Prepared:
    """Check all that can be checked, load the datasets, make the folder. Raises ConfigError and DatasetError."""
    config = setup.config
    validate(config, command)
    if command == "serve":
        require_loopback(config.gateway_host)
    prepared = Prepared(num_rollout=config.num_rollout)
    if command == "train":
        check_row_budget(config)
        if setup.resumed:
            _refuse_other_runs(setup.run_dir, config)
    records = trains_on_records(config)
    if command != "serve" and not records:
        prepared = _with_data(setup, command)
    make_run_dir(setup.run_dir)
    prepare(decodes=not records and (command == "train" or config.engine == "torch"))
    return prepared


def saved_options(run_dir: Path) -> dict[str, object]:
    """The options of a run, as its folder has them. Raises ConfigError where there is none."""
    path = run_dir / "config.toml"
    if not path.exists():
        raise ConfigError(f"--resume {run_dir}: there is no run in this folder (it has no config.toml)")
    return read_config_file(path)


def _with_data(setup: RunSetup, command: Command) -> Prepared:
    config = setup.config
    assert config.prompt_data is not None
    prompts = load_prompts(config, Path(config.prompt_data))
    if command == "rollout":
        return Prepared(prompts=prompts, num_rollout=config.num_rollout)
    num_rollout = _num_rollout(config, prompts)
    if not config.debug_rollout_only:
        check_training_run(replace(config, num_rollout=num_rollout))
    if setup.resumed:
        _check_places(setup.run_dir, config, prompts)
    evals = {item.name: load_prompts(config, item.path) for item in eval_sets(config)}
    return Prepared(prompts=prompts, evals=evals, num_rollout=num_rollout)


def _refuse_other_runs(run_dir: Path, config: RunConfig) -> None:
    if trains_on_records(config) or config.debug_rollout_only:
        flag = "--debug-rollout-only" if config.debug_rollout_only else "--load-debug-rollout-data"
        raise ConfigError(f"--resume {run_dir}: a run with {flag} cannot be resumed; start a new one")
    with open_run(run_dir) as conn:
        if counts(conn)["prompts"].get("delivered"):
            raise ConfigError(f"--resume {run_dir}: this is a run of silva rollout or serve, which cannot be resumed")


def _check_places(run_dir: Path, config: RunConfig, dataset: Dataset) -> None:
    """DatasetError where prompts of the run are not found at their places, before a model is loaded."""
    source = PromptSource(dataset, num_epoch=config.num_epoch, shuffle=config.rollout_shuffle, seed=config.rollout_seed)
    with open_run(run_dir) as conn:
        for position, epoch, row in pending_places(conn):
            source.check_place(position=position, epoch=epoch, row=row)


def _num_rollout(config: RunConfig, dataset: Dataset) -> int | None:
    assert config.rollout_batch_size is not None
    counts = [] if config.num_rollout is None else [config.num_rollout]
    if config.num_epoch is not None:
        counts.append(math.ceil(len(dataset.rows) * config.num_epoch / config.rollout_batch_size))
    return min(counts, default=None)
