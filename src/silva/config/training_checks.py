"""Checks of the options of algorithm and training: what cannot work, or would do nothing, together."""

from __future__ import annotations

from silva.config.addresses import is_address, is_base_url
from silva.config.options import RunConfig
from silva.config.parse import options
from silva.train import ALGORITHMS, SPECIAL_OPTIONS, Algorithm
from silva.types import ConfigError, flag_of

_TIS_BAND = ("tis_clip", "tis_clip_low", "tis_level", "tis_mode")
_NEEDED = {
    # options that only refine another one
    "use_kl_loss": ("kl_loss_coef", "kl_loss_type", "use_unbiased_kl"),
    "use_tis": (*_TIS_BAND, "custom_tis_function_path"),
    "use_opsm": ("opsm_delta",),
}


def algorithm_of(config: RunConfig) -> Algorithm:
    """The row of the algorithm that the options name."""
    return ALGORITHMS[config.advantage_estimator]


def needs_reference(config: RunConfig) -> bool:
    """Whether the options need the log-probs of a reference model."""
    return config.use_kl_loss or config.kl_coef > 0


def check_algorithm(config: RunConfig) -> None:
    """Raise ConfigError for the first combination that cannot work or in which an option would do nothing."""
    algorithm = algorithm_of(config)
    for name in sorted(SPECIAL_OPTIONS):
        _check_special(config, name)
    check_credit(config)
    for flag, others in _NEEDED.items():
        for name in others:
            if _is_set(config, name) and not getattr(config, flag):
                raise ConfigError(f"{_shown(config, name)} does nothing without {flag_of(flag)}; set both or neither")
    _check_clip(config)
    _check_reference(config)
    _check_off_policy(config, algorithm)
    _check_tis(config)
    _check_distillation(config)
    _check_schedule(config)
    _check_reduction(config)


def check_credit(config: RunConfig) -> None:
    """Raise ConfigError for options that would not change the credit."""
    name, path = "disable_grpo_std_normalization", config.agentic_custom_advantage_path
    _check_special(config, name)
    if _is_set(config, name) and path is not None:
        raise ConfigError(
            f"{_shown(config, name)} does nothing with --agentic-custom-advantage-path {path}, whose credit is taken "
            "as it is; leave one out"
        )


def check_training_run(config: RunConfig, *, num_rollout: int | None, records: bool) -> None:
    """Raise ConfigError for what cannot work in an updating run of so many rollout steps (None: not known yet).

    `records`: it trains on recorded rollouts.
    """
    if num_rollout is not None:
        _check_length(config, num_rollout)
    if config.lr_schedule == "cosine" and records and num_rollout is None:
        raise ConfigError("--lr-schedule cosine needs --num-rollout here: how many files there are is not known")
    if config.max_token_staleness is not None and not records and config.max_staleness == 0:
        raise ConfigError(
            f"{_shown(config, 'max_token_staleness')} does nothing where rollout waits for training (--max-staleness "
            "0): every token is of the weights that it trains. Leave it out; it goes with --load-debug-rollout-data"
        )


def _check_length(config: RunConfig, num_rollout: int) -> None:
    """Refuse what such a number of rollout steps leaves no step for."""
    run = f"the {num_rollout} rollout steps of the run (--num-rollout, --num-epoch)"
    if config.num_critic_only_steps >= num_rollout:
        raise ConfigError(f"{_shown(config, 'num_critic_only_steps')} leaves the policy none of {run} to be trained in")
    if config.warmup > num_rollout:
        raise ConfigError(f"{_shown(config, 'warmup')} is more than {run}: the learning rate would never be --lr")
    if config.warmup == num_rollout and config.lr_schedule == "cosine":
        raise ConfigError(f"{_shown(config, 'warmup')} leaves --lr-schedule cosine none of {run} to fall in")


def is_group_of_one(config: RunConfig) -> bool:
    """Whether the algorithm compares the sessions of a prompt while each prompt has only one."""
    compared = algorithm_of(config).compares and config.agentic_custom_advantage_path is None
    return compared and config.n_samples_per_prompt == 1


def check_group_size(config: RunConfig) -> None:
    """Raise ConfigError where every group would be a single session, with nothing to compare it with."""
    if is_group_of_one(config):
        raise ConfigError(
            f"--advantage-estimator {config.advantage_estimator} with --n-samples-per-prompt 1 trains nothing: a group "
            "of one has no spread. Take at least 2 samples a prompt, or let --agentic-custom-advantage-path give credit"
        )


def training_warnings(config: RunConfig) -> list[str]:
    """Sentences about what works but is probably not intended."""
    found: list[str] = []
    filters = [
        f"{flag} {value:g}"
        for flag, value, off in (
            ("--rollout-top-p", config.rollout_top_p, 1),
            ("--rollout-top-k", config.rollout_top_k, -1),
        )
        if value != off
    ]
    if config.use_tis and filters and config.rollout_temperature > 0:
        found.append(
            f"--use-tis with {' and '.join(filters)}: tokens were drawn from what these left, while both log-probs "
            "that TIS compares are those before it, so the weights do not see this difference"
        )
    if config.kl_coef and config.kl_loss_coef:
        found.append(
            f"{_shown(config, 'kl_coef')} and {_shown(config, 'kl_loss_coef')}: the KL to the reference model counts "
            "twice, in the rewards of tokens and in the loss"
        )
    if config.use_kl_loss and not config.kl_loss_coef:
        found.append(
            "--use-kl-loss with --kl-loss-coef 0: the KL to the reference model is measured, but not in the loss"
        )
    if config.kl_loss_coef and config.kl_loss_type == "k1" and not config.use_unbiased_kl:
        found.append(
            "--kl-loss-type k1 has no gradient in the mean, so it does not hold the policy near the reference model; "
            "take k2 or k3, or add --use-unbiased-kl"
        )
    if config.lr == 0:
        found.append("--lr 0: steps are measured, but the policy stays as it is")
    return found


def _check_special(config: RunConfig, name: str) -> None:
    """Refuse an option that the algorithm does not use."""
    algorithm = algorithm_of(config)
    if name not in algorithm.options and _is_set(config, name):
        users = ", ".join(row.name for row in ALGORITHMS.values() if name in row.options)
        raise ConfigError(
            f"{_shown(config, name)} does nothing with --advantage-estimator {algorithm.name}; it goes with {users}"
        )


def _check_clip(config: RunConfig) -> None:
    if config.eps_clip >= 1:
        raise ConfigError(f"--eps-clip {config.eps_clip:g} leaves the policy ratio no lower bound; it must be below 1")


def _check_reference(config: RunConfig) -> None:
    if config.ref_load is not None and not needs_reference(config):
        raise ConfigError(
            f"--ref-load {config.ref_load} does nothing: neither --use-kl-loss nor --kl-coef asks for a reference model"
        )


def _check_off_policy(config: RunConfig, algorithm: Algorithm) -> None:
    if config.use_rollout_logprobs and config.use_tis:
        raise ConfigError(
            "--use-rollout-logprobs uses the recorded log-probs as those of the old policy, so --use-tis would compare "
            "them with themselves; leave one out"
        )
    if config.use_rollout_logprobs and not (algorithm.ratio or config.use_unbiased_kl):
        raise ConfigError(
            f"--use-rollout-logprobs does nothing with --advantage-estimator {algorithm.name}, whose loss has no ratio"
        )
    if config.use_opsm and not algorithm.compares and config.agentic_custom_advantage_path is None:
        raise ConfigError(
            f"--use-opsm leaves sequences out by the sign of their credit, and with --advantage-estimator "
            f"{algorithm.name} the credit is the reward itself, which is not measured against anything. Leave it out, "
            "or let --agentic-custom-advantage-path give credit"
        )


def _check_tis(config: RunConfig) -> None:
    if config.custom_tis_function_path is not None:
        for name in _TIS_BAND:
            if _is_set(config, name):
                raise ConfigError(
                    f"{_shown(config, name)} does nothing with --custom-tis-function-path, whose weights are taken as "
                    "they are; leave one out"
                )
    if config.use_tis and not config.tis_clip_low <= 1 <= config.tis_clip:
        raise ConfigError(
            f"--tis-clip-low {config.tis_clip_low:g} to --tis-clip {config.tis_clip:g} leaves out 1, the weight of "
            "tokens that trainer and engine find equally likely; the band must contain it"
        )
    if config.use_tis and config.tis_clip_low == config.tis_clip:
        raise ConfigError("--tis-clip-low 1 and --tis-clip 1 leave no band: every weight would be 1 or 0")


def _check_distillation(config: RunConfig) -> None:
    if config.opd_coef and config.opd_teacher is None:
        raise ConfigError(f"--opd-coef {config.opd_coef:g} needs --opd-teacher, the model to learn from")
    if config.opd_teacher is not None and not config.opd_coef:
        raise ConfigError(f"--opd-teacher {config.opd_teacher} does nothing without --opd-coef above 0")
    if config.opd_teacher is None or not is_address(config.opd_teacher):
        return
    if not is_base_url(config.opd_teacher):
        raise ConfigError(
            f"--opd-teacher {config.opd_teacher!r} is not an address of a server; it must look like http://host:port"
        )
    if config.rollout_temperature not in (0, 1):
        raise ConfigError(
            f"--opd-teacher {config.opd_teacher} cannot be used with --rollout-temperature "
            f"{config.rollout_temperature:g}: a server gives the log-probs of a prompt at temperature 1 only, and the "
            "policy is trained at that of the rollout. Take 1, or the folder of the teacher"
        )


def _check_schedule(config: RunConfig) -> None:
    if config.lr_schedule != "cosine" and _is_set(config, "min_lr"):
        raise ConfigError(f"{_shown(config, 'min_lr')} does nothing with --lr-schedule {config.lr_schedule}")
    if config.min_lr and config.min_lr >= config.lr:
        raise ConfigError(
            f"--min-lr {config.min_lr:g} is not below --lr {config.lr:g}, so --lr-schedule cosine has nowhere to fall"
        )


def _check_reduction(config: RunConfig) -> None:
    reduction = config.loss_reduction
    if config.calculate_per_token_loss and reduction not in (None, "per_token"):
        raise ConfigError(
            f"--calculate-per-token-loss contradicts --loss-reduction {reduction}; leave one out "
            "(--no-calculate-per-token-loss where a file sets it)"
        )
    if reduction == "seq_mean_token_sum_norm" and config.rollout_max_response_len is None:
        raise ConfigError(f"--loss-reduction {reduction} divides by --rollout-max-response-len, which is not set")


def _is_set(config: RunConfig, name: str) -> bool:
    """The option has another value than its default."""
    return getattr(config, name) != options()[name].default


def _shown(config: RunConfig, name: str) -> str:
    value = getattr(config, name)
    return flag_of(name) if value is True else f"{flag_of(name)} {value}"
