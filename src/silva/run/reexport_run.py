"""Builds the samples of a run anew from its ledger, under other options, without agents."""

from __future__ import annotations

import functools
import math
import sqlite3
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import BinaryIO

from tokenizers import Tokenizer

from silva.config import RunConfig, validate_judgement
from silva.export import Exporter
from silva.judge import Decode
from silva.rollout import Account, Reexport, Side
from silva.run.parts import run_id_of
from silva.run.settings import (
    group_settings,
)
from silva.run.user_code import build_credit, build_rewards, open_user_code
from silva.store import PLACEHOLDER, DumpLine, check_dump_template, dump_path, open_run, whole_file
from silva.types import ConfigError, Mode, StorageFault, system_reason

Summary = dict[str, object]
GROUPS_AT_ONCE = 8
"""Groups that wait for functions of the user at the same time."""


async def reexport(config: RunConfig, run_dir: Path, *, out: str | None = None, force: bool = False) -> Summary:
    """Write the samples of each rollout step; returns what became of sessions and groups, before and now.

    `out`: the path of the files, with `{rollout_id}` for the step (None: in the run's folder). `force`: write over
    files that exist. Raises ConfigError, LedgerError, StorageFault.
    """
    template = out or str(run_dir / "reexport" / f"{PLACEHOLDER}.jsonl")
    check_dump_template(template, "--out")
    validate_judgement(config)
    with open_run(run_dir) as conn:
        files = _files(conn, template, force=force)
        accounts = await _reexport(config, run_dir, conn, files)
    summary: Summary = {"run": str(run_dir), "files": [str(path) for path in files.values()]}
    return summary | {mode: _told(account) for mode, account in accounts.items()}


def _files(conn: sqlite3.Connection, template: str, *, force: bool) -> dict[int, Path]:
    """The file of each rollout step. Raises ConfigError where one exists."""
    steps = [step for (step,) in conn.execute("SELECT DISTINCT step FROM groups ORDER BY 1")]
    files = {step: dump_path(template, step) for step in steps}
    there = [str(path) for path in files.values() if path.exists()]
    if there and not force:
        raise ConfigError(
            f"{len(there)} of {len(files)} files exist already: {', '.join(there[:3])}. Write to another place (--out) "
            "or over them (--force)"
        )
    return files


async def _reexport(
    config: RunConfig, run_dir: Path, conn: sqlite3.Connection, files: dict[int, Path]
) -> Mapping[Mode, Account]:
    async with AsyncExitStack() as stack:
        folder = next(iter(files.values()), run_dir).parent
        if config.custom_rm_path is not None or config.has_custom_advantage:
            folder.mkdir(parents=True, exist_ok=True)  # for the log of the functions, which is written beside the files
        code = await open_user_code(config, folder, run_id_of(run_dir), stack)
        work = Reexport(
            conn,
            exporter=Exporter(config),
            rewards=build_rewards(config, code, _no_texts if code.reward is None else _decoder(config)),
            credit=build_credit(config, code),
            settings={mode: group_settings(config, mode) for mode in ("train", "eval")},
            width=1 if code.reward is None and code.advantage is None else GROUPS_AT_ONCE,
        )
        for step, path in files.items():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with whole_file(path) as file:
                    await work.step(step, functools.partial(_write, file, path))
            except OSError as error:
                raise _unwritable(path, error) from error
    return work.accounts


def _write(file: BinaryIO, path: Path, line: DumpLine) -> None:
    try:
        file.write(line.encode())
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> StorageFault:
    return StorageFault(f"--out {path} cannot be written: {system_reason(error)}")


def _decoder(config: RunConfig) -> Decode:
    """Ids to text by the run's own tokenizer. Raises ConfigError where its files are gone."""
    path = Path(str(config.hf_checkpoint)) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the tokenizer of the run, {path}, cannot be read: {system_reason(error)}. A reward function needs the "
            "texts of samples; say where it is with --hf-checkpoint"
        ) from error
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def _no_texts(ids: object) -> str:
    raise AssertionError("texts are formed for a reward function only")


def _told(account: Account) -> Summary:
    return {
        "before": _side(account.before),
        "after": _side(account.after),
        "num_left_out": account.num_left_out,
        "num_without_credit": account.num_without_credit,
    }


def _side(side: Side) -> Summary:
    return {
        "sessions": _by_state(side.sessions),
        "groups": _by_state(side.groups),
        "num_contexts": side.num_contexts,
        "num_rewards": len(side.rewards),
        "mean_reward": math.fsum(side.rewards) / len(side.rewards) if side.rewards else None,
    }


def _by_state(counts: Counter[tuple[str, str | None]]) -> dict[str, dict[str, int]]:
    document: dict[str, dict[str, int]] = {}
    for (state, reason), number in sorted(counts.items(), key=lambda item: (item[0][0], item[0][1] or "")):
        document.setdefault(state, {})[reason or "none"] = number
    return document
