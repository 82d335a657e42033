"""The parts that every command builds from the options alone: folder, dataset, codec, parser, engine."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from silva.codec import TurnCodec
from silva.config import RunConfig, check_token_budget
from silva.data import Dataset, load_dataset
from silva.inference import Engine
from silva.parsers import TurnParser
from silva.run.settings import num_threads
from silva.types import Clock, ConfigError

if TYPE_CHECKING:
    from silva.model import DecoderConfig

log = logging.getLogger("silva")

DEFAULT_CONTEXT_LEN = 32768


def choose_run_dir(config: RunConfig) -> Path:
    """The run's folder as an absolute path; it may not contain a run yet (the ledger checks that)."""
    return Path(config.run_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}").absolute()


def make_run_dir(run_dir: Path) -> None:
    """Raises ConfigError where the folder cannot be made."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run-dir {run_dir} cannot be made: {error.strerror or error}") from error


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
    """The parser that the options name; `auto` follows the chat template and the tokenizer."""
    return TurnParser.from_names(
        reasoning=config.agentic_reasoning_parser,
        tool_call=config.agentic_tool_call_parser,
        template=codec.template_source,
        added_tokens=codec.added_tokens,
    )


def build_engine(config: RunConfig, codec: TurnCodec, clock: Clock, *, hf_dir: Path, version: int = 0) -> Engine:
    """The engine that the options name, with the weights of `hf_dir` at `version` (a server has its own)."""
    if config.engine == "scripted":
        from silva.inference import ScriptedEngine, read_script

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
    from silva.model import DecoderConfig, hf_config_dict

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
    """Most tokens of a session's context: the option, else the model's config.json, else a common size."""
    if config.rollout_max_context_len is not None:
        return config.rollout_max_context_len
    try:
        model = json.loads((hf_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return DEFAULT_CONTEXT_LEN  # a folder with a tokenizer alone is enough for a script
    limit = model.get("max_position_embeddings") if isinstance(model, dict) else None
    return limit if isinstance(limit, int) and limit > 1 else DEFAULT_CONTEXT_LEN


def check_row_budget(config: RunConfig) -> None:
    """Raise ConfigError where --max-tokens-per-gpu is less than the longest context that the model allows."""
    hf_dir = Path(str(config.hf_checkpoint))
    if (hf_dir / "config.json").is_file():  # a folder without it is refused as a model, with a message of its own
        check_token_budget(config, context_limit(config, hf_dir), f"the limit of the model in {hf_dir}")
