"""Builds the learner from the options: the policy, its objective and the models that it needs."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from silva.config import RunConfig, algorithm_of, training_warnings
from silva.run.side_models import open_side_models, side_fingerprints
from silva.run.user_code import UserCode, build_custom_tis

if TYPE_CHECKING:  # it imports torch
    from silva.train.learner import Learner

log = logging.getLogger("silva")


async def open_learner(
    config: RunConfig, stack: AsyncExitStack, user_code: UserCode, *, num_rollout: int | None
) -> Learner:
    """The learner of a run with `num_rollout` rollout steps (None: it is not known how many).

    `stack` ends its thread, and closes the connections to a teacher.
    """
    from silva.run.learner_settings import build_schedule, critic_config, policy_config
    from silva.train.critic import ValueTrainer
    from silva.train.learner import Learner, TorchThread
    from silva.train.policy import PolicyTrainer

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
