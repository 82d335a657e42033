"""Options of rollout: how many prompts and sessions, and how many at once."""

from __future__ import annotations

from dataclasses import dataclass

from silva.types import opt


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """What makes a rollout step, and how far it may run ahead."""

    agentic_concurrency: int | None = opt("capacity", None, low=1)
    """Prompt groups that may be resident at once (default: --rollout-batch-size)."""
    agentic_eval_concurrency: int | None = opt("capacity", None, low=1)
    """Eval prompt groups that may be resident at once (default: as many sessions as in training)."""
    rollout_batch_size: int | None = opt("rollout", None, low=1)
    """Prompts per rollout step (required)."""
    n_samples_per_prompt: int = opt("rollout", 1, low=1)
    """Sessions per prompt."""
    over_sampling_batch_size: int | None = opt("rollout", None, low=1)
    """Prompts requested at once; only the default, --rollout-batch-size, is built."""
    agentic_min_group_size: int | None = opt("rollout", None, low=1)
    """Sessions that must be left for a group to count (default: 2; 1 with one sample per prompt)."""
    max_staleness: int = opt("async", 0, low=0)
    """Train steps that rollout may run ahead; only 0 (wait for training) is built."""
    update_weights_interval: int = opt("async", 1, low=1)
    """Rollout steps between weight updates; only 1 is built."""
    n_samples_per_eval_prompt: int = opt("eval", 1, low=1)
    """Sessions per eval prompt."""
