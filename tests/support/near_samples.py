"""Samples whose recorded log-probs stand at a known distance from those of a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from train_tiny import make_sample

from silva.train.objective import ObjectiveConfig
from silva.train.policy import PolicyConfig, PolicyTrainer
from silva.types.rollout import TrainingSample


def make_trainer(hf_dir: Path, objective: ObjectiveConfig, **more: Any) -> PolicyTrainer:
    return PolicyTrainer(hf_dir, PolicyConfig(objective=objective, **({"lr": 1e-2, "device": "cpu"} | more)))


def samples_near(trainer: PolicyTrainer, shifts: Sequence[float | Sequence[float]]) -> list[TrainingSample]:
    """One session a shift (or its tokens'): three trainable tokens, recorded as the trainer has them less that."""
    made = [make_sample(f"s{i}", [3, 4, 5 + i, 6, 7], [0, 1, 1, 0, 1]) for i in range(len(shifts))]
    near: list[TrainingSample] = []
    for one, now_T, shift in zip(made, trainer.compute_logprobs(made), shifts, strict=True):
        of_each = iter([shift] * 3 if isinstance(shift, float) else shift)
        recorded = [float(now_T[t]) - next(of_each) if bit else 0.0 for t, bit in enumerate(one.loss_mask)]
        near.append(replace(one, logprobs=recorded))
    return near


def with_credit(samples: Sequence[TrainingSample], *credits: float) -> list[TrainingSample]:
    return [replace(one, credit=credit) for one, credit in zip(samples, credits, strict=True)]
