"""Numbers of one rollout step.

Rewards and metadata are taken over sessions, lengths and turns over exported contexts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from silva.credit.shared import num_shared_responses
from silva.rollout.groups import GroupResult
from silva.types.rollout import TrainingSample


def rollout_metrics(groups: Sequence[GroupResult]) -> dict[str, float]:
    """Reward, lengths, turns and metadata numbers over the sessions of groups that count."""
    samples = [sample for group in groups for sample in group.samples]
    sessions = one_a_session(samples)
    rewards = [sample.reward for sample in sessions if sample.reward is not None]
    metrics: dict[str, float] = {
        "rollout/num_groups": float(len(groups)),
        "rollout/num_sessions": float(len(sessions)),
    }
    if not samples:
        return metrics
    if rewards:
        metrics["rollout/raw_reward"] = math.fsum(rewards) / len(rewards)
    metrics["rollout/truncated_ratio"] = sum(sample.truncated for sample in samples) / len(samples)
    metrics |= spread("rollout/response_len", [float(sample.num_trainable) for sample in samples])
    metrics["rollout/shared_responses"] = float(num_shared_responses(samples))
    metrics |= spread("rollout/num_turn", [float(sample.num_turns) for sample in samples])
    for name, values in _metadata_numbers(sessions).items():
        metrics |= spread(name, values)
    return metrics


def one_a_session(samples: Iterable[TrainingSample]) -> list[TrainingSample]:
    """The first exported context of each session."""
    first: dict[str, TrainingSample] = {}
    for sample in samples:
        first.setdefault(sample.session_id, sample)
    return list(first.values())


def spread(prefix: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, median, largest and smallest of some numbers."""
    # Divided before they are added: the sum of large numbers that agents report may be no float any more.
    middle = statistics.median_low(values) / 2 + statistics.median_high(values) / 2
    return {
        f"{prefix}/mean": math.fsum(value / len(values) for value in values),
        f"{prefix}/median": middle,
        f"{prefix}/max": max(values),
        f"{prefix}/min": min(values),
    }


def staleness_metrics(samples: Iterable[TrainingSample], *, version: int) -> dict[str, float]:
    """Train steps between the oldest weights of each sample and the weights in training."""
    ages = [float(version - sample.min_version) for sample in samples]
    return {"staleness/mean": math.fsum(ages) / len(ages), "staleness/max": max(ages)} if ages else {}


def _metadata_numbers(samples: Sequence[TrainingSample]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.metadata.items():
            if isinstance(value, (int, float)) and math.isfinite(_as_float(value)):
                found.setdefault(name, []).append(_as_float(value))
    return found


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
