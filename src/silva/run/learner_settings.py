"""From the options of a run to the settings of what learns. Imports torch."""

from __future__ import annotations

from pathlib import Path

from silva.config import RunConfig, algorithm_of
from silva.run.settings import num_threads
from silva.train import ClipOptions, KlOptions, Schedule, TisOptions
from silva.train.advantages import AdvantageConfig
from silva.train.critic import CriticConfig
from silva.train.objective import ObjectiveConfig
from silva.train.policy import PolicyConfig
from silva.types import part_of


def build_schedule(config: RunConfig, num_rollout: int | None) -> Schedule:
    """The course of the learning rates."""
    floor = config.min_lr / config.lr if config.lr else 0.0
    return Schedule(kind=config.lr_schedule, warmup=config.warmup, total=num_rollout, floor=floor)


def policy_config(config: RunConfig) -> PolicyConfig:
    """The training options as the policy takes them."""
    algorithm = algorithm_of(config)
    built_in_tis = config.use_tis and config.custom_tis_function_path is None
    objective = part_of(
        config,
        ObjectiveConfig,
        policy_loss=algorithm.policy_loss(),
        clip=part_of(config, ClipOptions),
        rollout_as_old=config.use_rollout_logprobs,
        tis=part_of(config, TisOptions) if built_in_tis else None,
        opsm_delta=config.opsm_delta if config.use_opsm else None,
        kl=part_of(config, KlOptions) if config.use_kl_loss else None,
    )
    whiten = algorithm.whitens or config.normalize_advantages
    advantages = part_of(config, AdvantageConfig, kind=algorithm.advantages, whiten=whiten)
    threads = num_threads(Path(str(config.hf_checkpoint)))
    return part_of(config, PolicyConfig, objective=objective, advantages=advantages, num_threads=threads)


def critic_config(config: RunConfig, policy: PolicyConfig) -> CriticConfig:
    """The critic learns as the policy does but for its learning rate."""
    lr = config.lr if config.critic_lr is None else config.critic_lr
    return part_of(config, CriticConfig, num_threads=policy.num_threads, lr=lr)
