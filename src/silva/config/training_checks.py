"""Checks of the options of algorithm and training: what cannot work, or would do nothing, together."""

from __future__ import annotations

from collections.abc import Iterator

from silva.config.addresses import is_address, is_base_url
from silva.config.options import RunConfig
from silva.config.sentences import filled, is_set, refuse
from silva.train import ALGORITHMS, SPECIAL_OPTIONS, Algorithm
from silva.types import flag_of

_TIS_BAND = ("tis_clip", "tis_clip_low", "tis_level", "tis_mode")
_REFINED = {
    "use_kl_loss": ("kl_loss_coef", "kl_loss_type", "use_unbiased_kl"),
    "use_tis": (*_TIS_BAND, "custom_tis_function_path"),
    "use_opsm": ("opsm_delta",),
}
"""Options that only refine another one."""


def algorithm_of(config: RunConfig) -> Algorithm:
    """The row of the algorithm that the options name."""
    return ALGORITHMS[config.advantage_estimator]


def needs_reference(config: RunConfig) -> bool:
    """Whether the options need the log-probs of a reference model."""
    return config.use_kl_loss or config.kl_coef > 0


def trains_on_records(config: RunConfig) -> bool:
    """Whether the groups of each step come from files instead of agents."""
    return config.load_debug_rollout_data is not None


def is_group_of_one(config: RunConfig) -> bool:
    """Whether the algorithm compares the sessions of a prompt while each prompt has only one."""
    compared = algorithm_of(config).compares and config.agentic_custom_advantage_path is None
    return compared and config.n_samples_per_prompt == 1


def check_algorithm(config: RunConfig) -> None:
    """Raise ConfigError for the first combination that cannot work or in which an option would do nothing."""
    refuse(config, _algorithm(config))


def check_training_run(config: RunConfig) -> None:
    """Raise ConfigError for what cannot work in a run that updates the policy (`num_rollout` None: not known yet)."""
    refuse(config, _updates(config))


def training_warnings(config: RunConfig) -> list[str]:
    """Sentences about what works but is probably not intended."""
    return list(filled(config, _warnings(config)))


def credit_problems(c: RunConfig) -> Iterator[str]:
    """Options that would not change the credit."""
    name = "disable_grpo_std_normalization"
    yield from _not_used(c, name)
    if is_set(c, name) and c.agentic_custom_advantage_path is not None:
        yield (
            "--disable-grpo-std-normalization does nothing with {agentic_custom_advantage_path}, whose credit is taken "
            "as it is; leave one out"
        )


def _not_used(c: RunConfig, name: str) -> Iterator[str]:
    """An option that the algorithm does not use."""
    if name not in algorithm_of(c).options and is_set(c, name):
        users = ", ".join(row.name for row in ALGORITHMS.values() if name in row.options)
        yield f"{{{name}}} does nothing with {{advantage_estimator}}; it goes with {users}"


def _algorithm(c: RunConfig) -> Iterator[str]:
    for name in sorted(SPECIAL_OPTIONS):
        yield from _not_used(c, name)
    yield from credit_problems(c)
    for flag, others in _REFINED.items():
        for name in others:
            if is_set(c, name) and not getattr(c, flag):
                yield f"{{{name}}} does nothing without {flag_of(flag)}; set both or neither"
    if c.eps_clip >= 1:
        yield "{eps_clip:g} leaves the policy ratio no lower bound; it must be below 1"
    if c.ref_load is not None and not needs_reference(c):
        yield "{ref_load} does nothing: neither --use-kl-loss nor --kl-coef asks for a reference model"
    yield from _off_policy(c)
    yield from _distillation(c)
    if is_set(c, "min_lr") and c.lr_schedule != "cosine":
        yield "{min_lr} does nothing with {lr_schedule}"
    if c.min_lr and c.min_lr >= c.lr:
        yield "{min_lr:g} is not below {lr:g}, so --lr-schedule cosine has nowhere to fall"
    if c.calculate_per_token_loss and c.loss_reduction not in (None, "per_token"):
        yield (
            "--calculate-per-token-loss contradicts {loss_reduction}; leave one out (--no-calculate-per-token-loss "
            "where a file sets it)"
        )
    if c.loss_reduction == "seq_mean_token_sum_norm" and c.rollout_max_response_len is None:
        yield "{loss_reduction} divides by --rollout-max-response-len, which is not set"


def _off_policy(c: RunConfig) -> Iterator[str]:
    algorithm = algorithm_of(c)
    if c.use_rollout_logprobs and c.use_tis:
        yield (
            "--use-rollout-logprobs uses the recorded log-probs as those of the old policy, so --use-tis would compare "
            "them with themselves; leave one out"
        )
    if c.use_rollout_logprobs and not (algorithm.ratio or c.use_unbiased_kl):
        yield "--use-rollout-logprobs does nothing with {advantage_estimator}, whose loss has no ratio"
    if c.use_opsm and not algorithm.compares and c.agentic_custom_advantage_path is None:
        yield (
            "--use-opsm leaves sequences out by the sign of their credit, and with {advantage_estimator} the credit is "
            "the reward itself, which is not measured against anything. Leave it out, or let "
            "--agentic-custom-advantage-path give credit"
        )
    for name in _TIS_BAND:
        if c.custom_tis_function_path is not None and is_set(c, name):
            own = "--custom-tis-function-path, whose weights are taken as they are"
            yield f"{{{name}}} does nothing with {own}; leave one out"
    if c.use_tis and not c.tis_clip_low <= 1 <= c.tis_clip:
        yield (
            "{tis_clip_low:g} to {tis_clip:g} leaves out 1, the weight of tokens that trainer and engine find equally "
            "likely; the band must contain it"
        )
    if c.use_tis and c.tis_clip_low == c.tis_clip:
        yield "{tis_clip_low:g} and {tis_clip:g} leave no band: every weight would be 1 or 0"


def _distillation(c: RunConfig) -> Iterator[str]:
    if c.opd_coef and c.opd_teacher is None:
        yield "{opd_coef:g} needs --opd-teacher, the model to learn from"
    if c.opd_teacher is not None and not c.opd_coef:
        yield "{opd_teacher} does nothing without --opd-coef above 0"
    if c.opd_teacher is None or not is_address(c.opd_teacher):
        return
    if not is_base_url(c.opd_teacher):
        yield "--opd-teacher {opd_teacher.value!r} is not an address of a server; it must look like http://host:port"
    if c.rollout_temperature not in (0, 1):
        yield (
            "{opd_teacher} cannot be used with {rollout_temperature:g}: a server gives the log-probs of a prompt at "
            "temperature 1 only, and the policy is trained at that of the rollout. Take 1, or the folder of the teacher"
        )


def _updates(c: RunConfig) -> Iterator[str]:
    if c.num_rollout is not None:
        run = "the {num_rollout.value} rollout steps of the run (--num-rollout, --num-epoch)"
        if c.num_critic_only_steps >= c.num_rollout:
            yield f"{{num_critic_only_steps}} leaves the policy none of {run} to be trained in"
        if c.warmup > c.num_rollout:
            yield f"{{warmup}} is more than {run}: the learning rate would never be --lr"
        if c.warmup == c.num_rollout and c.lr_schedule == "cosine":
            yield f"{{warmup}} leaves --lr-schedule cosine none of {run} to fall in"
    if c.lr_schedule == "cosine" and trains_on_records(c) and c.num_rollout is None:
        yield "--lr-schedule cosine needs --num-rollout here: how many files there are is not known"
    if c.max_token_staleness is not None and not trains_on_records(c) and c.max_staleness == 0:
        yield (
            "{max_token_staleness} does nothing where rollout waits for training (--max-staleness 0): every token is "
            "of the weights that it trains. Leave it out; it goes with --load-debug-rollout-data"
        )


def _warnings(c: RunConfig) -> Iterator[str]:
    filters = " and ".join(f"{{{name}:g}}" for name in ("rollout_top_p", "rollout_top_k") if is_set(c, name))
    if c.use_tis and filters and c.rollout_temperature > 0:
        yield (
            f"--use-tis with {filters}: tokens were drawn from what these left, while both log-probs that TIS compares "
            "are those before it, so the weights do not see this difference"
        )
    if c.kl_coef and c.kl_loss_coef:
        yield (
            "{kl_coef} and {kl_loss_coef}: the KL to the reference model counts twice, in the rewards of tokens and in "
            "the loss"
        )
    if c.use_kl_loss and not c.kl_loss_coef:
        yield "--use-kl-loss with --kl-loss-coef 0: the KL to the reference model is measured, but not in the loss"
    if c.kl_loss_coef and c.kl_loss_type == "k1" and not c.use_unbiased_kl:
        yield (
            "--kl-loss-type k1 has no gradient in the mean, so it does not hold the policy near the reference model; "
            "take k2 or k3, or add --use-unbiased-kl"
        )
    if c.lr == 0:
        yield "--lr 0: steps are measured, but the policy stays as it is"
