"""Checks that span options: what a command needs, and combinations that cannot work."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from silva.config.addresses import is_base_url
from silva.config.options import RunConfig
from silva.config.sentences import is_set, refuse
from silva.config.training_checks import (
    check_algorithm,
    check_training_run,
    credit_problems,
    is_group_of_one,
    trains_on_records,
)
from silva.forest import parse_profiles
from silva.store import check_dump_template
from silva.types import ConfigError, flag_of

Command = Literal["train", "rollout", "serve"]
LEAST_TEMPERATURE = 1e-3
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_NEEDED = {
    "use_agentic_rollout": "agent processes are the only kind of rollout built now",
    "agent_command": "the command that runs one agent session",
    "prompt_data": "the JSON Lines or Parquet file of prompts",
    "rollout_batch_size": "the number of prompts of one rollout step",
}
"""Options without which no agents run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSet:
    """One file of eval prompts."""

    name: str
    """Its name in metrics."""
    path: Path
    """The JSON Lines or Parquet file."""


def validate(config: RunConfig, command: Command) -> None:
    """Raise ConfigError for the first thing that makes `command` impossible under these options."""
    records = trains_on_records(config)
    _need(config, "hf_checkpoint", "the folder of the start model and its tokenizer")
    refuse(config, _modes(config, command))
    if not records:
        _check_urls(config.engine_url)
        refuse(config, _engine(config, command))
        parse_profiles(config.agentic_profiles)
        if command == "serve":
            return
        _check_agents(config, command)
    refuse(config, chain(_two_credits(config), _packing(config), _save_hf(config)))
    check_algorithm(config)
    if command == "train" and not config.debug_rollout_only:
        check_training_run(config)
    for flag in ("save_debug_rollout_data", "load_debug_rollout_data"):
        if (template := getattr(config, flag)) is not None:
            check_dump_template(template, flag_of(flag))


def validate_judgement(config: RunConfig) -> None:
    """Raise ConfigError where the options of export, reward and credit do not fit together; others do not count."""
    parse_profiles(config.agentic_profiles)
    refuse(config, chain(_two_credits(config), credit_problems(config), _rewards(config)))


def eval_sets(config: RunConfig) -> list[EvalSet]:
    """The eval files by name. Raises ConfigError where the pairs or the interval do not fit together."""
    words = config.eval_prompt_data
    if len(words) % 2:
        raise ConfigError(
            f"--eval-prompt-data takes pairs of NAME and PATH; it has {len(words)} words: {' '.join(words)}"
        )
    sets = [EvalSet(name=words[i], path=Path(words[i + 1])) for i in range(0, len(words), 2)]
    names = [item.name for item in sets]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--eval-prompt-data names {twice!r} twice")
    bad = next((name for name in names if not _NAME.fullmatch(name)), None)
    if bad is not None:
        raise ConfigError(f"--eval-prompt-data: the name {bad!r} may have only letters, digits, '_', '.' and '-'")
    if config.eval_interval is not None and not sets:
        raise ConfigError("--eval-interval is set, but --eval-prompt-data names no file")
    if sets and config.eval_interval is None:
        raise ConfigError("--eval-prompt-data is set, but --eval-interval is not, so it would never be used")
    return sets


def min_group_size(config: RunConfig) -> int:
    """Sessions that must be left for a group to count."""
    if config.agentic_min_group_size is not None:
        return config.agentic_min_group_size
    return min(2, config.n_samples_per_prompt)


def check_token_budget(config: RunConfig, context_len: int, source: str) -> None:
    """Raise ConfigError where a packed row is too small for a whole context of `context_len` tokens."""
    budget = config.max_tokens_per_gpu
    if budget is not None and budget < context_len:
        raise ConfigError(
            f"--max-tokens-per-gpu {budget} is less than the {context_len} tokens that a context may have ({source}), "
            "and no sample is cut. Raise it, or set a lower --rollout-max-context-len"
        )


def several_contexts_problem(config: RunConfig) -> str | None:
    """Why silva train cannot take the several contexts that these options announce; None where it can."""
    flags = ["--agentic-export leaves"] if config.agentic_export == "leaves" else []
    flags += [f"--agentic-credit {config.agentic_credit}"] if config.agentic_credit is not None else []
    announced = f"with {' and '.join(flags)} a session may yield several contexts"
    if flags and not config.use_dynamic_batch_size:
        return (
            f"{announced}, which need --use-dynamic-batch-size (with --max-tokens-per-gpu): how many samples a step "
            "trains is then not known in advance"
        )
    if flags and not _credits_contexts(config):
        return (
            f"{announced}, and nothing says what credit each of them gets. Set --agentic-credit shared or split, or "
            "--agentic-custom-advantage-path; or train with --agentic-export strict or last"
        )
    return None


def one_context_reason(config: RunConfig) -> str | None:
    """Why silva train takes at most one context per session; None where it takes several."""
    needs: list[str] = []
    if not _credits_contexts(config):
        needs.append("--agentic-custom-advantage-path or --agentic-credit, which say what credit each of them gets")
    if not config.use_dynamic_batch_size:
        needs.append("--use-dynamic-batch-size with --max-tokens-per-gpu")
    return f"training on several needs {', and '.join(needs)} (docs/credit.md)" if needs else None


def _credits_contexts(config: RunConfig) -> bool:
    return config.agentic_credit is not None or config.agentic_custom_advantage_path is not None


def _need(config: RunConfig, name: str, what: str) -> None:
    if not getattr(config, name):
        raise ConfigError(f"{flag_of(name)} is missing: {what}")


def _check_agents(config: RunConfig, command: Command) -> None:
    """Raise ConfigError for what cannot work where agents run."""
    for name, what in _NEEDED.items():
        _need(config, name, what)
    if not Path(config.agent_cwd).is_dir():
        raise ConfigError(
            f"--agent-cwd is {config.agent_cwd!r}, which is not a folder ({Path(config.agent_cwd).absolute()}; paths "
            "start from where silva is started)"
        )
    if command == "train" and config.num_rollout is None and config.num_epoch is None:
        raise ConfigError("one of --num-rollout and --num-epoch is needed: without them the run would never end")
    refuse(config, _two_credits(config))
    if command == "train" and (problem := several_contexts_problem(config)) is not None:
        raise ConfigError(problem)
    refuse(config, chain(_groups(config, command), _rewards(config)))
    eval_sets(config)


def _check_urls(urls: list[str]) -> None:
    for url in urls:
        if not is_base_url(url):
            raise ConfigError(f"--engine-url {url!r} is not an address of a server; it must look like http://host:port")
    places = [url.rstrip("/") for url in urls]
    twice = next((url for url in places if places.count(url) > 1), None)
    if twice is not None:
        raise ConfigError(f"--engine-url names {twice} twice")


def _modes(c: RunConfig, command: Command) -> Iterator[str]:
    for name in ("rollout_temperature", "eval_temperature"):
        # engines treat a temperature just above 0 as 0, whose log-probs are those at 1; the trainer would score others
        if 0 < (getattr(c, name) or 0) < LEAST_TEMPERATURE:
            rule = f"0, which always takes the likeliest token, or at least {LEAST_TEMPERATURE:g}"
            yield f"{flag_of(name)} is {{{name}.value:g}}; it must be {rule}"
    records = trains_on_records(c)
    for name in ("load_debug_rollout_data", "debug_train_only", "debug_rollout_only"):
        if command != "train" and is_set(c, name):
            yield f"{flag_of(name)} goes with silva train; silva {command} trains nothing anyway"
    if c.debug_train_only and not records:
        yield (
            "--debug-train-only runs no agents, so it needs --load-debug-rollout-data, the files with the samples to "
            "train on"
        )
    if c.debug_rollout_only and records:
        yield "--debug-rollout-only trains nothing and --load-debug-rollout-data runs no agents: take one of them"
    for name in ("eval_interval", "save_debug_rollout_data"):
        if records and is_set(c, name):
            yield f"{flag_of(name)} cannot be used with --load-debug-rollout-data, which runs no agents; leave it out"
    for name in ("save_interval", "save_hf"):
        if c.debug_rollout_only and is_set(c, name):
            yield f"{flag_of(name)} cannot be used with --debug-rollout-only, which has no new weights; leave it out"


def _engine(c: RunConfig, command: Command) -> Iterator[str]:
    if c.engine == "scripted" and c.engine_script is None:
        yield "--engine scripted needs --engine-script, the JSON Lines file of its answers"
    for name, engine in (("engine_script", "scripted"), ("engine_log", "scripted"), ("engine_url", "sglang")):
        if is_set(c, name) and c.engine != engine:
            yield f"{flag_of(name)} is set, but --engine is {c.engine}; it goes with --engine {engine}"
    if c.engine == "sglang":
        yield from _sglang(c, command)
    if c.rollout_top_k == 0:
        yield "--rollout-top-k is 0, which would keep no token; -1 switches it off"
    if (c.rollout_max_response_len or 0) >= (c.rollout_max_context_len or math.inf):
        yield "{rollout_max_response_len} leaves no room for a prompt in {rollout_max_context_len}"
    if c.max_staleness != 0:
        yield "--max-staleness is {max_staleness.value}; rollout ahead of training is not built yet, only 0 is"
    if c.update_weights_interval != 1:
        yield "--update-weights-interval is {update_weights_interval.value}; only 1 is built yet"
    if c.over_sampling_batch_size not in (None, c.rollout_batch_size):
        yield (
            "--over-sampling-batch-size is {over_sampling_batch_size.value} and {rollout_batch_size}; asking for more "
            "prompts than a step trains is not built yet"
        )


def _sglang(c: RunConfig, command: Command) -> Iterator[str]:
    if not c.engine_url:
        yield "--engine sglang needs --engine-url, the address of at least one server (http://host:port)"
    if command == "train" and not c.debug_rollout_only:
        yield (
            "--engine sglang cannot be used by silva train yet: loading new weights into a server is not built. silva "
            "rollout, silva serve and silva train --debug-rollout-only work with it"
        )
    eval_heat = c.rollout_temperature if c.eval_temperature is None else c.eval_temperature
    for flag, filters, heat in (
        ("--rollout-top-p", c.rollout_top_p < 1, c.rollout_temperature),
        ("--rollout-top-k", c.rollout_top_k != -1, max(c.rollout_temperature, eval_heat)),
        ("--eval-top-p", (c.eval_top_p or c.rollout_top_p) < 1, eval_heat),
    ):
        if filters and heat > 0:
            yield (
                f"{flag} cannot be used with --engine sglang: no server reports which mass it kept, so that would be "
                "recorded wrongly. Leave it out"
            )


def _groups(c: RunConfig, command: Command) -> Iterator[str]:
    if (c.agent_start_timeout or 0) > c.agent_timeout:
        yield "{agent_start_timeout:g} is longer than {agent_timeout:g}"
    if command == "train" and is_group_of_one(c):
        yield (
            "{advantage_estimator} with --n-samples-per-prompt 1 trains nothing: a group of one has no spread. Take at "
            "least 2 samples a prompt, or let --agentic-custom-advantage-path give credit"
        )
    if min_group_size(c) > c.n_samples_per_prompt:
        yield "{agentic_min_group_size} is more than {n_samples_per_prompt}: no group could count"
    assert c.rollout_batch_size is not None
    sessions, steps = c.rollout_batch_size * c.n_samples_per_prompt, c.num_steps_per_rollout
    step = "a rollout step ({rollout_batch_size.value} prompts x {n_samples_per_prompt.value} samples)"
    for name in ("global_batch_size", "num_steps_per_rollout"):
        if sessions % (getattr(c, name) or 1):
            yield f"{{{name}}} does not divide the {sessions} sessions of {step}"
    if steps is not None and c.global_batch_size not in (None, sessions // steps):
        yield (
            f"{{num_steps_per_rollout}} and {{global_batch_size}} disagree: of {sessions} sessions, {steps} step(s) "
            f"take {sessions // steps} each; leave one of the two out"
        )


def _two_credits(c: RunConfig) -> Iterator[str]:
    if c.agentic_custom_advantage_path is not None and c.agentic_credit is not None:
        yield (
            "{agentic_credit} and {agentic_custom_advantage_path} both say what credit a context gets; leave one out"
        )


def _packing(c: RunConfig) -> Iterator[str]:
    if c.use_dynamic_batch_size and c.max_tokens_per_gpu is None:
        yield "--use-dynamic-batch-size needs --max-tokens-per-gpu, the most tokens of one packed row"
    if c.max_tokens_per_gpu is not None and not c.use_dynamic_batch_size:
        yield "{max_tokens_per_gpu} does nothing without --use-dynamic-batch-size; set both or neither"
    if c.use_dynamic_batch_size and c.micro_batch_size != 1:
        yield (
            "{micro_batch_size} contradicts --use-dynamic-batch-size, where --max-tokens-per-gpu sets how many samples "
            "a row has; leave one out (--micro-batch-size 1 where a file sets it)"
        )
    if c.rollout_max_context_len is not None:
        check_token_budget(c, c.rollout_max_context_len, "--rollout-max-context-len")


def _rewards(c: RunConfig) -> Iterator[str]:
    for name in ("group_rm", "reward_failure_score"):
        if c.custom_rm_path is None and is_set(c, name):
            yield f"{flag_of(name)} needs --custom-rm-path, the function that it is about (docs/rewards.md)"
    if c.group_rm and c.reward_failure_score is not None:
        yield "--reward-failure-score cannot be used with --group-rm: where the function fails, its group is dropped"


def _save_hf(c: RunConfig) -> Iterator[str]:
    if c.save_hf is None:
        return
    if Path(c.save_hf).exists() and not Path(c.save_hf).is_dir():
        yield "--save-hf is {save_hf.value!r}, which is a file; it must name a folder"
    for name in ("hf_checkpoint", "ref_load", "opd_teacher"):
        if is_set(c, name) and Path(c.save_hf).resolve() == Path(getattr(c, name)).resolve():
            yield (
                f"{{save_hf}} is the folder of {flag_of(name)}, which would be overwritten: no resumed run could start "
                "from it again. Name another one"
            )
