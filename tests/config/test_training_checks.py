"""Options of algorithm and training that contradict each other, or would do nothing, are refused at the start."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from silva.config.checks import Command, validate, validate_judgement
from silva.config.options import RunConfig
from silva.config.parse import from_values
from silva.config.training_checks import training_warnings
from silva.run.build_learner import build_schedule, policy_config
from silva.run.settings import credit_of
from silva.train.advantages import AdvantageConfig
from silva.train.algorithms import ALGORITHMS, SPECIAL_OPTIONS
from silva.train.objective import ObjectiveConfig
from silva.train.options import TrainingOptions
from silva.types.errors import ConfigError

RECORDS = {"hf_checkpoint": "m", "load_debug_rollout_data": "{rollout_id}.jsonl"}
TIS = {"use_tis": True}
PPO = {"advantage_estimator": "ppo"}
OTHER_VALUES: dict[str, Any] = {
    **{"eps_clip": 0.3, "eps_clip_high": 0.3, "eps_clip_c": 3.0, "disable_grpo_std_normalization": True},
    **{"kl_coef": 0.1, "gamma": 0.9, "lambd": 0.9, "critic_lr": 1e-5, "value_clip": 0.1, "num_critic_only_steps": 1},
}
"""One value of each special option that is not its default."""


def live(**more: Any) -> RunConfig:
    """Options that silva train takes."""
    values = {
        **{"hf_checkpoint": "m", "use_agentic_rollout": True, "agent_command": "true", "prompt_data": "p"},
        **{"rollout_batch_size": 4, "n_samples_per_prompt": 2, "num_rollout": 4},
    }
    return from_values({**values, **more})


def refused(config: RunConfig, part: str, command: Command = "train") -> str:
    with pytest.raises(ConfigError) as caught:
        validate(config, command)
    assert re.search(part, str(caught.value)), str(caught.value)
    return str(caught.value)


def test_each_algorithm_takes_its_own_options_and_no_others() -> None:
    assert OTHER_VALUES.keys() == SPECIAL_OPTIONS
    for row in ALGORITHMS.values():
        estimator = {"advantage_estimator": row.name}
        validate(live(**estimator, **{name: OTHER_VALUES[name] for name in row.options}), "train")
        for name in SPECIAL_OPTIONS - row.options:
            flag = "--" + name.replace("_", "-")
            value = "" if OTHER_VALUES[name] is True else f" {OTHER_VALUES[name]}"
            text = refused(live(**estimator, **{name: OTHER_VALUES[name]}), f"^{flag}{value} does nothing with")
            assert f"--advantage-estimator {row.name}; it goes with " in text


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"eps_clip": 1.0}, "--eps-clip 1 .* below 1"),
        (
            {"disable_grpo_std_normalization": True, "agentic_custom_advantage_path": "m.f"},
            "--disable-grpo-std-normalization does nothing with --agentic-custom-advantage-path m.f",
        ),
        ({"kl_loss_coef": 0.1}, "--kl-loss-coef 0.1 does nothing without --use-kl-loss"),
        ({"kl_loss_type": "k3"}, "--kl-loss-type k3 does nothing without --use-kl-loss"),
        ({"use_unbiased_kl": True}, "--use-unbiased-kl does nothing without --use-kl-loss"),
        ({"ref_load": "there"}, "--ref-load there does nothing: neither --use-kl-loss nor --kl-coef"),
        ({"tis_clip": 3.0}, "--tis-clip 3.0 does nothing without --use-tis"),
        ({"tis_clip_low": 0.5}, "--tis-clip-low 0.5 does nothing without"),
        ({"tis_level": "sequence"}, "--tis-level sequence does nothing without"),
        ({"tis_mode": "mask"}, "--tis-mode mask does nothing without"),
        ({"custom_tis_function_path": "m.f"}, "--custom-tis-function-path m.f does nothing without --use-tis"),
        ({**TIS, "custom_tis_function_path": "m.f", "tis_mode": "mask"}, "mask does nothing with --custom-tis"),
        ({**TIS, "custom_tis_function_path": "m.f", "tis_level": "sequence"}, "sequence does nothing with --custom"),
        ({**TIS, "custom_tis_function_path": "m.f", "tis_clip": 3.0}, "--tis-clip 3.0 does nothing with --custom"),
        ({**TIS, "custom_tis_function_path": "m.f", "tis_clip_low": 0.5}, "--tis-clip-low 0.5 does nothing with"),
        ({**TIS, "tis_clip_low": 3.0}, "--tis-clip-low 3 to --tis-clip 2 leaves out 1"),
        ({**TIS, "tis_clip": 0.9}, "--tis-clip-low 0 to --tis-clip 0.9 leaves out 1"),
        ({**TIS, "tis_clip": 1.0, "tis_clip_low": 1.0}, "leave no band"),
        ({**TIS, "use_rollout_logprobs": True}, "--use-tis would compare them with themselves; leave one out"),
        ({"use_rollout_logprobs": True, "advantage_estimator": "rloo"}, "rloo, whose loss has no ratio"),
        ({"opsm_delta": 0.1}, "--opsm-delta 0.1 does nothing without --use-opsm"),
        ({"use_opsm": True, **PPO}, "--use-opsm .* --advantage-estimator ppo"),
        ({"use_opsm": True, "advantage_estimator": "reinforce_plus_plus"}, "--use-opsm .* reinforce_plus_plus"),
        ({"max_token_staleness": 0}, "--max-token-staleness 0 does nothing where rollout waits"),
        ({"opd_coef": 0.1}, "--opd-coef 0.1 needs --opd-teacher"),
        ({"opd_teacher": "t"}, "--opd-teacher t does nothing without --opd-coef"),
        ({**PPO, "num_critic_only_steps": 4}, "--num-critic-only-steps 4 leaves the policy none of the 4 rollout"),
        ({"warmup": 5}, "--warmup 5 is more than the 4 rollout steps .*--num-rollout.*never be --lr"),
        ({"warmup": 4, "lr_schedule": "cosine"}, "--warmup 4 leaves --lr-schedule cosine none of the 4 rollout steps"),
        ({"min_lr": 1e-9}, "--min-lr 1e-09 does nothing with --lr-schedule constant"),
        ({"lr_schedule": "cosine", "min_lr": 1e-6}, "--min-lr 1e-06 is not below --lr 1e-06"),
        (
            {"calculate_per_token_loss": True, "loss_reduction": "session_mean"},
            "session_mean; .*--no-calculate-per-token-loss where a file",
        ),
        ({"loss_reduction": "seq_mean_token_sum_norm"}, "divides by --rollout-max-response-len, which is not set"),
        ({"n_samples_per_prompt": 1}, "grpo with --n-samples-per-prompt 1 trains nothing"),
        ({"n_samples_per_prompt": 1, "advantage_estimator": "maxrl"}, "maxrl with --n-samples-per-prompt 1"),
    ],
)
def test_what_cannot_work_or_does_nothing_is_refused(values: dict[str, Any], part: str) -> None:
    refused(live(**values), part)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"lr_schedule": "cosine"}, "--lr-schedule cosine needs --num-rollout here"),
        ({"warmup": 3, "num_rollout": 2}, "--warmup 3 is more than the 2 rollout steps"),
        ({"advantage_estimator": "sapo", "eps_clip": 0.3}, "--eps-clip 0.3 does nothing with"),
        ({"kl_loss_coef": 0.1}, "--kl-loss-coef 0.1 does nothing"),
    ],
)
def test_the_same_holds_on_recorded_rollouts(values: dict[str, Any], part: str) -> None:
    refused(from_values({**RECORDS, **values}), part)


def test_what_makes_sense_is_taken() -> None:
    for values in (
        {**TIS, "tis_level": "geometric", "tis_mode": "mask", "tis_clip_low": 0.999, "tis_clip": 1.001},
        {**TIS, "tis_clip": 1.0},
        {**TIS, "tis_clip_low": 1.0},
        {**TIS, "custom_tis_function_path": "m.f", "use_opsm": True, "opsm_delta": 0.1},
        {"use_rollout_logprobs": True, "use_opsm": True},
        {"use_opsm": True, **PPO, "agentic_custom_advantage_path": "m.f"},
        {"use_kl_loss": True, "ref_load": "there"},
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl", "use_unbiased_kl": True},
        {**PPO, "kl_coef": 0.1, "ref_load": "there", "num_critic_only_steps": 3, "n_samples_per_prompt": 1},
        {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "n_samples_per_prompt": 1},
        {"advantage_estimator": "rloo", "agentic_custom_advantage_path": "m.f", "n_samples_per_prompt": 1},
        {"lr_schedule": "cosine", "warmup": 3, "min_lr": 1e-7},
        {"warmup": 4},  # the last step has --lr
        {"warmup": 9, "num_rollout": None, "num_epoch": 1},  # how many steps that is, the data tell
        {"loss_reduction": "seq_mean_token_sum_norm", "rollout_max_response_len": 8},
        {"calculate_per_token_loss": True, "loss_reduction": "per_token"},
        {"entropy_coef": 0.01, "lr": 0.0},
        {"debug_rollout_only": True, "warmup": 9, "max_token_staleness": 2},  # nothing is updated
    ):
        validate(live(**values), "train")
    validate(from_values({**RECORDS, "max_token_staleness": 2, "warmup": 9}), "train")
    for command in ("rollout", "serve"):
        validate(live(warmup=9, max_token_staleness=2, n_samples_per_prompt=1), command)


def test_a_run_that_trains_nothing_refuses_contradictions_as_early() -> None:
    refused(live(kl_loss_coef=0.1), "--kl-loss-coef 0.1 does nothing", "rollout")
    validate(live(kl_loss_coef=0.1), "serve")
    with pytest.raises(ConfigError, match=r"--disable-grpo-std-normalization does nothing with .* rloo"):
        validate_judgement(live(advantage_estimator="rloo", disable_grpo_std_normalization=True))


ELSEWHERE = {
    # options that name another model or function, or that the trainer's loop reads
    *("ref_load", "opd_teacher", "custom_tis_function_path", "critic_lr", "value_clip", "num_critic_only_steps"),
    *("max_token_staleness", "num_steps_per_rollout", "global_batch_size"),
}
IN_EFFECT: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        "advantage_estimator": ("maxrl", {}),
        "eps_clip": (0.3, {}),
        "eps_clip_high": (0.3, {}),
        "eps_clip_c": (3.0, {}),
    },
    **{"disable_grpo_std_normalization": (True, {}), "normalize_advantages": (True, {})},
    **{"gamma": (0.9, PPO), "lambd": (0.9, PPO), "kl_coef": (0.1, PPO), "use_kl_loss": (True, {})},
    **{name: (value, {"use_kl_loss": True}) for name, value in (("kl_loss_coef", 0.1), ("kl_loss_type", "k2"))},
    **{"use_unbiased_kl": (True, {"use_kl_loss": True}), "entropy_coef": (0.1, {}), "use_tis": (True, {})},
    **{"tis_clip": (3.0, TIS), "tis_clip_low": (0.5, TIS), "tis_level": ("sequence", TIS), "tis_mode": ("mask", TIS)},
    **{"use_opsm": (True, {}), "opsm_delta": (0.1, {"use_opsm": True}), "use_rollout_logprobs": (True, {})},
    **{"opd_coef": (0.1, {"opd_teacher": "t"}), "calculate_per_token_loss": (True, {})},
    **{"loss_reduction": ("per_token", {}), "lr": (0.1, {}), "lr_schedule": ("cosine", {}), "warmup": (2, {})},
    **{"min_lr": (1e-7, {"lr_schedule": "cosine"}), "weight_decay": (0.1, {}), "clip_grad": (0.5, {})},
    **{"micro_batch_size": (2, {}), "max_tokens_per_gpu": (9, {"use_dynamic_batch_size": True})},
    "use_dynamic_batch_size": (True, {"max_tokens_per_gpu": 9}),
}
"""By option: a value that is not its default, and what it goes with."""


def test_no_option_is_accepted_and_ignored() -> None:
    assert {item.name for item in fields(TrainingOptions)} == IN_EFFECT.keys() | ELSEWHERE
    for name, (value, beside) in IN_EFFECT.items():
        config = live(**beside, **{name: value})
        validate(config, "train")
        try:
            without = live(**beside)
            validate(without, "train")
        except ConfigError:
            continue  # the two go together only
        assert built(config) != built(without), name


def built(config: RunConfig) -> tuple[object, ...]:
    """What the options make of the policy, the schedule and the credit."""
    return policy_config(config), build_schedule(config, 4), credit_of(config)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({**TIS, "rollout_top_p": 0.9}, r"--use-tis with --rollout-top-p 0\.9: "),
        ({**TIS, "rollout_top_k": 5, "rollout_top_p": 0.9}, "--rollout-top-p 0.9 and --rollout-top-k 5"),
        (
            {"kl_coef": 0.1, "kl_loss_coef": 0.2, "use_kl_loss": True, "kl_loss_type": "k2", **PPO},
            "--kl-coef 0.1 and --kl-loss-coef 0.2",
        ),
        ({"use_kl_loss": True}, "--kl-loss-coef 0: .* measured, but not in the loss"),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, "--kl-loss-type k1 has no gradient in the mean"),
        ({"lr": 0.0}, "--lr 0"),
    ],
)
def test_what_is_likely_not_meant_is_told(values: dict[str, Any], part: str) -> None:
    validate(live(**values), "train")
    (told,) = training_warnings(live(**values))
    assert re.search(part, told)


@pytest.mark.parametrize(
    "values",
    [
        {},
        TIS,
        {"rollout_top_p": 0.9},
        {**TIS, "rollout_top_k": 1, "rollout_temperature": 0.0},
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"},
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_unbiased_kl": True},
    ],
)
def test_nothing_is_told_where_all_is_well(values: dict[str, Any]) -> None:
    assert training_warnings(live(**values)) == []


def test_what_is_not_said_is_the_documented_default() -> None:
    on = {"advantage_estimator": "grpo", "eps_clip": 0.2, "gamma": 1.0, "lambd": 1.0, "kl_loss_type": "k1"}
    on |= {"tis_clip": 2.0, "tis_clip_low": 0.0, "tis_level": "token", "tis_mode": "truncate", "opsm_delta": 1e-4}
    on |= {"lr": 1e-6, "lr_schedule": "constant", "clip_grad": 1.0, "micro_batch_size": 1, "value_clip": 0.2}
    found = {item.name: item.default for item in fields(TrainingOptions)}
    assert {name: found.pop(name) for name in on} == on
    assert not any(found.values()), found  # all others are off, none or 0
    config = policy_config(live())
    assert config.reduction == "session_mean" and config.objective == ObjectiveConfig()
    assert config.advantages == AdvantageConfig() and config.clip_grad == 1.0
