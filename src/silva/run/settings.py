"""From the options of a run to the settings of its parts."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

from silva.config import RunConfig, min_group_size, one_context_reason
from silva.credit import CreditFunction
from silva.judge import GroupSettings
from silva.train import ALGORITHMS, credit_function
from silva.types import Mode

SMALL_MODEL_BYTES = 64 << 20


def num_threads(hf_dir: Path) -> int:
    """Torch threads for a model: one for a small one, whose steps are too short to share, else all cores."""
    num_bytes = sum(path.stat().st_size for path in hf_dir.glob("*.safetensors"))
    return 1 if num_bytes < SMALL_MODEL_BYTES else os.cpu_count() or 1


def group_settings(config: RunConfig, mode: Mode) -> GroupSettings:
    """How the groups of one mode run."""
    train = mode == "train"
    return GroupSettings(
        mode=mode,
        num_samples=config.n_samples_per_prompt if train else config.n_samples_per_eval_prompt,
        min_size=min_group_size(config) if train else 1,
        num_retries=config.agent_retries,
        shared_prefix=config.agentic_shared_prefix,
    )


def trained_groups(config: RunConfig) -> GroupSettings:
    """How the groups run whose samples the trainer takes."""
    return replace(
        group_settings(config, "train"),
        text_only=True,
        one_context=one_context_reason(config),
        one_reward=not config.has_custom_advantage,
    )


def train_concurrency(config: RunConfig) -> int:
    """Resident prompt groups in training."""
    assert config.rollout_batch_size is not None
    return config.agentic_concurrency or config.rollout_batch_size


def eval_concurrency(config: RunConfig) -> int:
    """Resident prompt groups in eval: as many sessions as training may hold, unless the option says otherwise."""
    if config.agentic_eval_concurrency is not None:
        return config.agentic_eval_concurrency
    return math.ceil(train_concurrency(config) * config.n_samples_per_prompt / config.n_samples_per_eval_prompt)


def credit_of(config: RunConfig) -> CreditFunction:
    """How the rewards of a group become the credit of its sessions."""
    return credit_function(
        ALGORITHMS[config.advantage_estimator], std_normalization=not config.disable_grpo_std_normalization
    )
