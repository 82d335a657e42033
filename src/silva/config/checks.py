"""Checks that span options: what a command needs, and combinations that cannot work."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from silva.config.addresses import is_base_url
from silva.config.options import RunConfig
from silva.config.training_checks import check_algorithm, check_credit, check_group_size, check_training_run
from silva.forest import parse_profiles
from silva.store import check_dump_template
from silva.types import ConfigError, flag_of

Command = Literal["train", "rollout", "serve"]
LEAST_TEMPERATURE = 1e-3
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSet:
    """One file of eval prompts."""

    name: str
    """Its name in metrics."""
    path: Path
    """The JSON Lines or Parquet file."""


def validate(config: RunConfig, command: Command) -> None:
    """Raise ConfigError for the first thing that makes `command` impossible under these options."""
    _need(config, "hf_checkpoint", "the folder of the start model and its tokenizer")
    _check_temperatures(config)
    _check_debug_modes(config, command)
    if trains_on_records(config):
        _check_credit(config)
        _check_packing(config)
        check_algorithm(config)
        check_training_run(config, num_rollout=config.num_rollout, records=True)
        _check_save_hf(config)
        return
    _check_engine(config, command)
    _check_not_built(config)
    parse_profiles(config.agentic_profiles)
    if command == "serve":
        return
    _check_agent(config)
    _need(config, "prompt_data", "the JSON Lines or Parquet file of prompts")
    _need(config, "rollout_batch_size", "the number of prompts of one rollout step")
    if command == "train" and config.num_rollout is None and config.num_epoch is None:
        raise ConfigError("one of --num-rollout and --num-epoch is needed: without them the run would never end")
    _check_credit(config)
    if command == "train" and (problem := several_contexts_problem(config)) is not None:
        raise ConfigError(problem)
    _check_groups(config, command)
    if command == "train" and not config.debug_rollout_only:
        check_training_run(config, num_rollout=config.num_rollout, records=False)
    _check_packing(config)
    _check_rewards(config)
    _check_save_hf(config)
    eval_sets(config)
    if config.save_debug_rollout_data is not None:
        check_dump_template(config.save_debug_rollout_data)


def _check_temperatures(config: RunConfig) -> None:
    """Engines treat a temperature just above 0 as 0, whose log-probs are those at 1; the trainer would score others."""
    for name in ("rollout_temperature", "eval_temperature"):
        value = getattr(config, name)
        if value is not None and 0 < value < LEAST_TEMPERATURE:
            raise ConfigError(
                f"{flag_of(name)} is {value:g}; it must be 0, which always takes the likeliest token, or at "
                f"least {LEAST_TEMPERATURE:g}"
            )


def trains_on_records(config: RunConfig) -> bool:
    """Whether the groups of each step come from files instead of agents."""
    return config.load_debug_rollout_data is not None


def _check_debug_modes(config: RunConfig, command: Command) -> None:
    """What --load-debug-rollout-data, --debug-train-only and --debug-rollout-only go together with."""
    modes = {
        "--load-debug-rollout-data": config.load_debug_rollout_data is not None,
        "--debug-train-only": config.debug_train_only,
        "--debug-rollout-only": config.debug_rollout_only,
    }
    given = [flag for flag, on in modes.items() if on]
    if given and command != "train":
        raise ConfigError(f"{given[0]} goes with silva train; silva {command} trains nothing anyway")
    if config.debug_train_only and config.load_debug_rollout_data is None:
        raise ConfigError(
            "--debug-train-only runs no agents, so it needs --load-debug-rollout-data, the files with the samples to "
            "train on"
        )
    if config.debug_rollout_only and len(given) > 1:
        raise ConfigError(f"--debug-rollout-only trains nothing and {given[0]} runs no agents: take one of them")
    if config.load_debug_rollout_data is not None:
        check_dump_template(config.load_debug_rollout_data, "--load-debug-rollout-data")
        _refuse_set(config, ("eval_interval", "save_debug_rollout_data"), given[0], "runs no agents")
    if config.debug_rollout_only:
        _refuse_set(config, ("save_interval", "save_hf"), "--debug-rollout-only", "has no new weights")


def _refuse_set(config: RunConfig, names: tuple[str, ...], flag: str, why: str) -> None:
    for name in names:
        if getattr(config, name) is not None:
            raise ConfigError(f"{flag_of(name)} cannot be used with {flag}, which {why}; leave it out")


def validate_judgement(config: RunConfig) -> None:
    """Raise ConfigError where the options of export, reward and credit do not fit together; others do not count."""
    parse_profiles(config.agentic_profiles)
    _check_credit(config)
    check_credit(config)
    _check_rewards(config)


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


def several_contexts_flags(config: RunConfig) -> list[str]:
    """The options in force by which a session may yield several contexts."""
    flags = {
        "--agentic-export leaves": config.agentic_export == "leaves",
        f"--agentic-credit {config.agentic_credit}": config.agentic_credit is not None,
    }
    return [flag for flag, on in flags.items() if on]


def several_contexts_problem(config: RunConfig) -> str | None:
    """Why silva train cannot take the several contexts that these options announce; None where it can."""
    flags = " and ".join(several_contexts_flags(config))
    if flags and not config.use_dynamic_batch_size:
        return (
            f"with {flags} a session may yield several contexts, which need --use-dynamic-batch-size "
            "(with --max-tokens-per-gpu): how many samples a step trains is then not known in advance"
        )
    if flags and not _credits_contexts(config):
        return (
            f"with {flags} a session may yield several contexts, and nothing says what credit each of them gets. Set "
            "--agentic-credit shared or split, or --agentic-custom-advantage-path; or train with --agentic-export "
            "strict or last"
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


def _check_credit(config: RunConfig) -> None:
    path, share = config.agentic_custom_advantage_path, config.agentic_credit
    if path is not None and share is not None:
        raise ConfigError(
            f"--agentic-credit {share} and --agentic-custom-advantage-path {path} both say what credit a context gets; "
            "leave one out"
        )


def _check_packing(config: RunConfig) -> None:
    budget = config.max_tokens_per_gpu
    if config.use_dynamic_batch_size and budget is None:
        raise ConfigError("--use-dynamic-batch-size needs --max-tokens-per-gpu, the most tokens of one packed row")
    if budget is not None and not config.use_dynamic_batch_size:
        raise ConfigError(
            f"--max-tokens-per-gpu {budget} does nothing without --use-dynamic-batch-size; set both or neither"
        )
    if config.use_dynamic_batch_size and config.micro_batch_size != 1:
        raise ConfigError(
            f"--micro-batch-size {config.micro_batch_size} contradicts --use-dynamic-batch-size, where "
            "--max-tokens-per-gpu sets how many samples a row has; leave one out (--micro-batch-size 1 where a file "
            "sets it)"
        )
    if config.rollout_max_context_len is not None:
        check_token_budget(config, config.rollout_max_context_len, "--rollout-max-context-len")


def _need(config: RunConfig, name: str, what: str) -> None:
    if getattr(config, name) is None:
        raise ConfigError(f"{flag_of(name)} is missing: {what}")


def _check_engine(config: RunConfig, command: Command) -> None:
    if config.engine == "scripted" and config.engine_script is None:
        raise ConfigError("--engine scripted needs --engine-script, the JSON Lines file of its answers")
    for name in ("engine_script", "engine_log"):
        if config.engine != "scripted" and getattr(config, name) is not None:
            raise ConfigError(
                f"{flag_of(name)} is set, but --engine is {config.engine}; it goes with --engine scripted"
            )
    if config.engine == "sglang":
        _check_sglang(config, command)
    elif config.engine_url:
        raise ConfigError(f"--engine-url is set, but --engine is {config.engine}; it goes with --engine sglang")
    if config.rollout_top_k == 0:
        raise ConfigError("--rollout-top-k is 0, which would keep no token; -1 switches it off")
    longest, context = config.rollout_max_response_len, config.rollout_max_context_len
    if longest is not None and context is not None and longest >= context:
        raise ConfigError(
            f"--rollout-max-response-len {longest} leaves no room for a prompt in --rollout-max-context-len {context}"
        )


def _check_sglang(config: RunConfig, command: Command) -> None:
    if not config.engine_url:
        raise ConfigError("--engine sglang needs --engine-url, the address of at least one server (http://host:port)")
    for url in config.engine_url:
        if not is_base_url(url):
            raise ConfigError(f"--engine-url {url!r} is not an address of a server; it must look like http://host:port")
    places = [url.rstrip("/") for url in config.engine_url]
    twice = next((url for url in places if places.count(url) > 1), None)
    if twice is not None:
        raise ConfigError(f"--engine-url names {twice} twice")
    if command == "train" and not config.debug_rollout_only:
        raise ConfigError(
            "--engine sglang cannot be used by silva train yet: loading new weights into a server is not built. silva "
            "rollout, silva serve and silva train --debug-rollout-only work with it"
        )
    eval_heat = config.rollout_temperature if config.eval_temperature is None else config.eval_temperature
    for flag, filters, heat in (
        ("--rollout-top-p", config.rollout_top_p < 1, config.rollout_temperature),
        ("--rollout-top-k", config.rollout_top_k != -1, max(config.rollout_temperature, eval_heat)),
        ("--eval-top-p", (config.eval_top_p or config.rollout_top_p) < 1, eval_heat),
    ):
        if filters and heat > 0:
            raise ConfigError(
                f"{flag} cannot be used with --engine sglang: no server reports which mass it kept, so that would be "
                "recorded wrongly. Leave it out"
            )


def _check_not_built(config: RunConfig) -> None:
    if config.max_staleness != 0:
        raise ConfigError(
            f"--max-staleness is {config.max_staleness}; rollout ahead of training is not built yet, only 0 is"
        )
    if config.update_weights_interval != 1:
        raise ConfigError(f"--update-weights-interval is {config.update_weights_interval}; only 1 is built yet")
    if config.over_sampling_batch_size not in (None, config.rollout_batch_size):
        raise ConfigError(
            f"--over-sampling-batch-size is {config.over_sampling_batch_size} and --rollout-batch-size "
            f"{config.rollout_batch_size}; asking for more prompts than a step trains is not built yet"
        )


def _check_agent(config: RunConfig) -> None:
    if not config.use_agentic_rollout:
        raise ConfigError("--use-agentic-rollout is missing: agent processes are the only kind of rollout built now")
    _need(config, "agent_command", "the command that runs one agent session")
    if not Path(config.agent_cwd).is_dir():
        where = Path(config.agent_cwd).absolute()
        raise ConfigError(
            f"--agent-cwd is {config.agent_cwd!r}, which is not a folder ({where}; paths start "
            "from where silva is started)"
        )
    start = config.agent_start_timeout
    if start is not None and start > config.agent_timeout:
        raise ConfigError(f"--agent-start-timeout {start:g} is longer than --agent-timeout {config.agent_timeout:g}")


def _check_groups(config: RunConfig, command: Command) -> None:
    n = config.n_samples_per_prompt
    if command == "train":
        check_group_size(config)
    if min_group_size(config) > n:
        raise ConfigError(
            f"--agentic-min-group-size {min_group_size(config)} is more than --n-samples-per-prompt {n}: "
            "no group could count"
        )
    assert config.rollout_batch_size is not None
    sessions = config.rollout_batch_size * n
    batch = config.global_batch_size
    if batch is not None and (batch > sessions or sessions % batch):
        raise ConfigError(
            f"--global-batch-size {batch} does not divide the {sessions} sessions of a rollout step "
            f"({config.rollout_batch_size} prompts x {n} samples)"
        )
    _check_num_steps(config, sessions)
    check_algorithm(config)


def _check_save_hf(config: RunConfig) -> None:
    if config.save_hf is not None and Path(config.save_hf).exists() and not Path(config.save_hf).is_dir():
        raise ConfigError(f"--save-hf is {config.save_hf!r}, which is a file; it must name a folder")
    for name in ("hf_checkpoint", "ref_load", "opd_teacher"):
        read = getattr(config, name)
        if config.save_hf is not None and read is not None and Path(config.save_hf).resolve() == Path(read).resolve():
            raise ConfigError(
                f"--save-hf {config.save_hf} is the folder of {flag_of(name)}, which would be overwritten: "
                "no resumed run could start from it again. Name another one"
            )


def _check_num_steps(config: RunConfig, sessions: int) -> None:
    steps, batch = config.num_steps_per_rollout, config.global_batch_size
    if steps is None:
        return
    if sessions % steps:
        raise ConfigError(
            f"--num-steps-per-rollout {steps} does not divide the {sessions} sessions of a rollout step "
            f"({config.rollout_batch_size} prompts x {config.n_samples_per_prompt} samples)"
        )
    if batch is not None and batch * steps != sessions:
        raise ConfigError(
            f"--num-steps-per-rollout {steps} and --global-batch-size {batch} disagree: of {sessions} sessions, "
            f"{steps} step(s) take {sessions // steps} each; leave one of the two out"
        )


def _check_rewards(config: RunConfig) -> None:
    if config.custom_rm_path is None:
        for flag, is_set in (
            ("--group-rm", config.group_rm),
            ("--reward-failure-score", config.reward_failure_score is not None),
        ):
            if is_set:
                raise ConfigError(f"{flag} needs --custom-rm-path, the function that it is about (docs/rewards.md)")
    elif config.group_rm and config.reward_failure_score is not None:
        raise ConfigError(
            "--reward-failure-score cannot be used with --group-rm: where the function fails, its group is dropped"
        )
