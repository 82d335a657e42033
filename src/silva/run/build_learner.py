"""Builds the learner from the options: the policy, its objective and the models that it needs. Imports torch."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path

from silva.config import RunConfig, algorithm_of, training_warnings
from silva.run.settings import num_threads
from silva.run.side_models import open_side_models, side_fingerprints
from silva.run.user_code import UserCode, build_custom_tis
from silva.train import ClipOptions, KlOptions, Schedule, TisOptions
from silva.train.advantages import AdvantageConfig
from silva.train.critic import CriticConfig, ValueTrainer
from silva.train.learner import Learner, TorchThread
from silva.train.objective import ObjectiveConfig
from silva.train.policy import PolicyConfig, PolicyTrainer
from silva.types import part_of

log = logging.getLogger("silva")


async def open_learner(
    config: RunConfig, stack: AsyncExitStack, user_code: UserCode, *, num_rollout: int | None
) -> Learner:
    """The learner of a run with `num_rollout` rollout steps (None: it is not known how many).

    `stack` ends its thread, and closes the connections to a teacher.
    """
    for warning in training_warnings(config):
        log.warning(warning)
    thread = TorchThread()
    stack.callback(thread.close)
    settings = policy_config(config)
    reference, teacher = await open_side_models(config, thread, settings, stack)
    policy = await thread.run(PolicyTrainer, str(config.hf_checkpoint), settings)
    critic = None
    if algorithm_of(config).advantages == "gae":
        critic = await thread.run(ValueTrainer, str(config.hf_checkpoint), critic_config(config, settings))
    return Learner(
        policy,
        thread,
        schedule=build_schedule(config, num_rollout),
        options=config,
        reference=reference,
        weigh_tokens=build_custom_tis(config, user_code),
        critic=critic,
        teacher=teacher,
        fingerprints=await asyncio.to_thread(side_fingerprints, config),
    )


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
