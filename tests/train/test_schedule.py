"""The learning rate over a run against a plain formula."""

from __future__ import annotations

import asyncio
import math
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_steps import make_trainer
from train_tiny import random_samples, write_least_model

from silva.train.learner import Learner, TorchThread
from silva.train.schedule import Schedule
from silva.types.errors import ConfigError


def plain(schedule: Schedule, rollout_id: int, step: int, num_steps: int) -> float:
    """Optimizer steps counted through, as if every rollout step had as many as this one."""
    done, rising = rollout_id * num_steps + step, schedule.warmup * num_steps
    if done < rising:
        return (done + 1) / rising
    if schedule.kind == "constant":
        return 1.0
    assert schedule.total is not None
    falling = schedule.total * num_steps - rising
    return schedule.floor + (1 - schedule.floor) * (1 + math.cos(math.pi * min(1, (done - rising) / falling))) / 2


@given(
    st.sampled_from(["constant", "cosine"]),
    st.integers(0, 5),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.integers(1, 4),
)
def test_it_follows_the_formula(kind: str, warmup: int, more: int, floor: float, num_steps: int) -> None:
    schedule = Schedule(kind=kind, warmup=warmup, total=warmup + more, floor=floor)  # type: ignore[arg-type]
    places = [(r, s) for r in range(warmup + more + 2) for s in range(num_steps)]
    shares = [schedule.scale(r, s, num_steps) for r, s in places]
    assert shares == pytest.approx([plain(schedule, r, s, num_steps) for r, s in places], abs=1e-12)
    rising = warmup * num_steps
    assert shares[:rising] == sorted(shares[:rising]) and min(shares[:rising], default=1) > 0
    assert shares[rising:] == sorted(shares[rising:], reverse=True) and shares[rising] == 1
    assert kind == "constant" or shares[-1] == pytest.approx(floor)  # also for steps behind the end


def test_known_values() -> None:
    schedule = Schedule(kind="cosine", warmup=2, total=6, floor=0.5)
    assert [schedule.scale(r) for r in range(7)] == pytest.approx(
        [0.5, 1.0, 1.0, 0.75 + 0.125 * 2**0.5, 0.75, 0.75 - 0.125 * 2**0.5, 0.5]
    )
    assert [schedule.scale(0, s, 4) for s in range(4)] == [0.125, 0.25, 0.375, 0.5]
    assert Schedule().scale(0) == Schedule().scale(10**6) == 1.0


def test_the_learner_goes_on_where_the_run_was(tmp_path: Path) -> None:
    # the curve knows only the number of the rollout step: a learner that starts at step 3 is one that resumed there
    policy = make_trainer(write_least_model(tmp_path, vocab_size=48), lr=0.01)
    schedule = Schedule(kind="cosine", warmup=2, total=5, floor=0.1)
    samples = random_samples(num_sessions=2)
    with closing(TorchThread()) as thread:
        learner = Learner(policy, thread, schedule=schedule)
        results = asyncio.run(learner.train_rollout(samples, rollout_step=3, num_steps=2))
    assert [result.metrics["train/lr"] for result in results] == pytest.approx(
        [0.01 * plain(schedule, 3, step, 2) for step in range(2)]
    )


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"kind": "linear"}, "'linear'"),
        ({"warmup": -1}, "-1"),
        ({"floor": 1.5}, "1.5"),
        ({"kind": "cosine"}, "None"),
        ({"kind": "cosine", "total": 3, "warmup": 3}, "leaves none to fall"),
    ],
)
def test_impossible_courses_are_refused(settings: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        Schedule(**settings)  # type: ignore[arg-type]
