"""Options of rollout: how many prompts and sessions, and how many at once."""

from __future__ import annotations

from dataclasses import dataclass

from silva.types import opt


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """What makes a rollout step, and how far it may run ahead."""

    agentic_concurrency: int | None = opt(
        "capacity", None, "Prompt groups that may be resident at once (default: --rollout-batch-size).", low=1
    )
    agentic_eval_concurrency: int | None = opt(
        "capacity",
        None,
        "Eval prompt groups that may be resident at once (default: as many sessions as in training).",
        low=1,
    )
    rollout_batch_size: int | None = opt("rollout", None, "Prompts per rollout step (required).", low=1)
    n_samples_per_prompt: int = opt("rollout", 1, "Sessions per prompt.", low=1)
    over_sampling_batch_size: int | None = opt(
        "rollout", None, "Prompts requested at once; only the default, --rollout-batch-size, is built.", low=1
    )
    agentic_min_group_size: int | None = opt(
        "rollout",
        None,
        "Sessions that must be left for a group to count (default: 2; 1 with one sample per prompt).",
        low=1,
    )
    max_staleness: int = opt(
        "async", 0, "Train steps that rollout may run ahead; only 0 (wait for training) is built.", low=0
    )
    update_weights_interval: int = opt("async", 1, "Rollout steps between weight updates; only 1 is built.", low=1)
    n_samples_per_eval_prompt: int = opt("eval", 1, "Sessions per eval prompt.", low=1)
