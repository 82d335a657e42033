"""From the options of a run to the settings of what learns. Imports torch."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from silva.config.options import RunConfig
from silva.config.validate_training import algorithm_of
from silva.run.settings import num_threads
from silva.train.advantages import AdvantageConfig
from silva.train.corrections import TisLevel, TisMode
from silva.train.critic import CriticConfig
from silva.train.losses.kl import KlType
from silva.train.objective import ObjectiveConfig
from silva.train.packed_model import Dtype
from silva.train.packing import Reduction
from silva.train.policy import PolicyConfig
from silva.train.schedule import Schedule, ScheduleKind


def build_schedule(config: RunConfig, num_rollout: int | None) -> Schedule:
    """The course of the learning rates."""
    from silva.train.schedule import Schedule

    return Schedule(
        kind=cast("ScheduleKind", config.lr_schedule),
        warmup=config.warmup,
        total=num_rollout,
        floor=config.min_lr / config.lr if config.lr else 0.0,
    )


def policy_config(config: RunConfig) -> PolicyConfig:
    """The training options as the policy takes them."""
    from silva.train.policy import PolicyConfig

    reduction = "per_token" if config.calculate_per_token_loss else config.loss_reduction or "session_mean"
    return PolicyConfig(
        dtype=cast("Dtype | None", config.dtype),
        lr=config.lr,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
        objective=_objective(config),
        advantages=_advantages(config),
        temperature=config.rollout_temperature,
        micro_batch_size=config.micro_batch_size,
        max_tokens=config.max_tokens_per_gpu,
        reduction=cast("Reduction", reduction),
        max_response_len=config.rollout_max_response_len,
        num_threads=num_threads(Path(str(config.hf_checkpoint))),
        seed=config.seed,
    )


def critic_config(config: RunConfig, policy: PolicyConfig) -> CriticConfig:
    """The critic learns as the policy does but for its learning rate."""
    from silva.train.critic import CriticConfig
    from silva.train.optimizer import UpdateConfig

    shared: dict[str, Any] = {item.name: getattr(policy, item.name) for item in fields(UpdateConfig)}
    if config.critic_lr is not None:
        shared["lr"] = config.critic_lr
    return CriticConfig(**shared, value_clip=config.value_clip)


def _objective(config: RunConfig) -> ObjectiveConfig:
    from silva.train.corrections import TisConfig
    from silva.train.losses.clip import ClipConfig
    from silva.train.losses.kl import KlLossConfig
    from silva.train.objective import ObjectiveConfig

    tis = kl = None
    if config.use_tis and config.custom_tis_function_path is None:
        tis = TisConfig(
            low=config.tis_clip_low,
            high=config.tis_clip,
            level=cast("TisLevel", config.tis_level),
            mode=cast("TisMode", config.tis_mode),
        )
    if config.use_kl_loss:
        kl = KlLossConfig(
            coef=config.kl_loss_coef, kind=cast("KlType", config.kl_loss_type), unbiased=config.use_unbiased_kl
        )
    return ObjectiveConfig(
        policy_loss=algorithm_of(config).policy_loss(),
        clip=ClipConfig(eps=config.eps_clip, eps_high=config.eps_clip_high, dual_clip=config.eps_clip_c),
        rollout_as_old=config.use_rollout_logprobs,
        tis=tis,
        opsm_delta=config.opsm_delta if config.use_opsm else None,
        entropy_coef=config.entropy_coef,
        kl=kl,
        opd_coef=config.opd_coef,
    )


def _advantages(config: RunConfig) -> AdvantageConfig:
    from silva.train.advantages import AdvantageConfig

    algorithm = algorithm_of(config)
    return AdvantageConfig(
        kind=algorithm.advantages,
        whiten=algorithm.whitens or config.normalize_advantages,
        kl_coef=config.kl_coef,
        gamma=config.gamma,
        lambd=config.lambd,
    )
