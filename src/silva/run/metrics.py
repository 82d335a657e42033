"""Numbers of one rollout step. Each session counts once, however many contexts it exported."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from silva.credit import by_session, num_shared_responses, pass_rates
from silva.rollout import GroupTally, StepGroups, first_reward
from silva.types import TrainingSample, mean, spread

log = logging.getLogger("silva.rollout")

Contexts = Sequence[TrainingSample]

_OWN_PREFIXES = tuple(
    f"{name}/" for name in ("rollout", "train", "eval", "perf", "ledger", "forest", "gateway", "engine")
)
_OWN_FIELDS = ("staleness", "reward/latency_s")
_OWN_HELPERS = ("response_len", "num_turn")


def rollout_metrics(step: StepGroups, *, passrate: bool = False) -> dict[str, float]:
    """Rewards, lengths, turns and the agents' numbers over the sessions of groups that count, and the rates over the
    slots of all groups that ended in the step.
    """
    sessions = by_session(sample for group in step.groups for sample in group.samples)
    metrics: dict[str, float] = {
        "rollout/num_groups": float(len(step.groups)),
        "rollout/num_sessions": float(len(sessions)),
        "rollout/num_contexts": float(sum(map(len, sessions))),
        "rollout/shared_responses": float(num_shared_responses(one for some in sessions for one in some)),
        **reward_metrics("rollout/raw_reward", "rollout", sessions),
        **slot_metrics("rollout", step.tallies),
    }
    if passrate:
        metrics |= passrate_metrics("rollout", step.tallies)
    if not sessions:
        return metrics
    metrics["rollout/truncated_ratio"] = mean([float(any(one.truncated for one in some)) for some in sessions])
    metrics |= spread("rollout/response_len", [float(sum(response_lengths(some).values())) for some in sessions])
    metrics |= spread("rollout/num_turn", [float(len(response_lengths(some))) for some in sessions])
    metrics |= helper_metrics("rollout", sessions)
    for name, values in _numbers(sessions, lambda sample: sample.metadata).items():
        if name.startswith(_OWN_PREFIXES) or name in _OWN_FIELDS:
            _tell_taken("metadata field", name)
            continue
        metrics |= spread(name, values)
    return metrics


def reward_metrics(name: str, prefix: str, sessions: Sequence[Contexts]) -> dict[str, float]:
    """The mean reward of the sessions that have one, and how many have."""
    rewards = [reward for some in sessions if (reward := first_reward(some)) is not None]
    metrics = {f"{prefix}/num_rewarded": float(len(rewards))}
    if rewards:
        metrics[name] = mean(rewards)
    return metrics


def slot_metrics(prefix: str, tallies: Sequence[GroupTally]) -> dict[str, float]:
    """What became of every slot, and of the groups that do not count; `raw_reward_all` takes failed slots as 0."""
    slots, failed = sum(one.num_slots for one in tallies), sum(one.num_failed for one in tallies)
    metrics = {f"{prefix}/num_slots": float(slots), f"{prefix}/num_failed": float(failed)}
    for state in ("dropped", "filtered"):
        metrics[f"{prefix}/num_{state}_groups"] = float(sum(one.state == state for one in tallies))
    if slots:
        metrics[f"{prefix}/failed_ratio"] = failed / slots
    rewards = [reward for one in tallies for reward in one.rewards]
    if len(rewards) + failed:
        metrics[f"{prefix}/raw_reward_all"] = math.fsum(reward / (len(rewards) + failed) for reward in rewards)
    return metrics


def passrate_metrics(prefix: str, tallies: Sequence[GroupTally]) -> dict[str, float]:
    """pass@k over the slots of all groups that ended. Failed slots are there, as not passed."""
    if not tallies:
        return {}
    size = max(one.num_slots for one in tallies)
    metrics: dict[str, float] = {}
    for rate in pass_rates([(one.num_judged, one.num_passed) for one in tallies], group_size=size):
        metrics[f"{prefix}/passrate/num_groups@{rate.k}"] = float(rate.num_groups)
        if rate.value is not None:
            metrics[f"{prefix}/passrate/pass@{rate.k}"] = rate.value
    for name in ("failed", "unrewarded", "ambiguous"):
        metrics[f"{prefix}/passrate/num_{name}"] = float(sum(getattr(one, f"num_{name}") for one in tallies))
    if metrics[f"{prefix}/passrate/num_ambiguous"] and not any(one.num_judged for one in tallies):
        _tell_no_passrate(prefix)
    return metrics


def helper_metrics(prefix: str, sessions: Sequence[Contexts]) -> dict[str, float]:
    """The numbers that came with rewards besides them."""
    metrics: dict[str, float] = {}
    for name, values in _numbers(sessions, lambda sample: sample.helpers).items():
        if name in _OWN_HELPERS:
            _tell_taken("entry of a reward object", name)
            continue
        metrics |= spread(f"{prefix}/{name}", values)
    return metrics


def response_lengths(contexts: Contexts) -> dict[int, int]:
    """Sampled tokens of each turn of a session, by node; a turn that contexts share is there once."""
    return {span.node_id: span.length for sample in contexts for span in sample.responses}


def staleness_metrics(samples: Iterable[TrainingSample], *, version: int) -> dict[str, float]:
    """Train steps between the oldest weights of each session and the weights in training."""
    ages = [float(version - min(one.min_version for one in contexts)) for contexts in by_session(samples)]
    return {"staleness/mean": math.fsum(ages) / len(ages), "staleness/max": max(ages)} if ages else {}


def _numbers(
    sessions: Sequence[Contexts], fields_of: Callable[[TrainingSample], Mapping[str, Any]]
) -> dict[str, list[float]]:
    """By field, one value for each session that has it: the mean over its contexts that have it."""
    found: dict[str, list[float]] = {}
    for contexts in sessions:
        here: dict[str, list[float]] = {}
        for sample in contexts:
            for name, value in fields_of(sample).items():
                if isinstance(value, (int, float)) and math.isfinite(_as_float(value)):
                    here.setdefault(name, []).append(_as_float(value))
        for name, values in here.items():
            found.setdefault(name, []).append(mean(values))
    return found


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


@functools.cache
def _tell_no_passrate(prefix: str) -> None:
    log.warning(
        "there is no %s/passrate/pass@k: every session that was judged carries a reward in several contexts; the pass "
        "rate takes sessions in which exactly one context does",
        prefix,
    )


@functools.cache
def _tell_taken(kind: str, name: str) -> None:
    log.warning("the %s %r is left out of the metrics: Silva has numbers of that name; call it otherwise", kind, name)
