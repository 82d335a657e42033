"""What a learner promises about its versions and about how models beside the policy are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from train_steps import make_trainer
from train_tiny import random_samples, write_least_model

from silva.train.learner import Learner, TorchThread
from silva.train.signals import PerSample
from silva.types.rollout import TrainingSample


class Asked:
    """A reference model that gives every token the log-prob -1 and keeps which sessions it was asked about at once."""

    def __init__(self) -> None:
        self.sessions: list[set[str]] = []

    async def score(self, samples: Sequence[TrainingSample]) -> PerSample:
        self.sessions.append({sample.session_id for sample in samples})
        return [np.full(len(sample.token_ids), -1.0) for sample in samples]


def test_a_reference_scores_the_samples_of_each_step_together_as_the_step_packs_them(tmp_path: Path) -> None:
    trainer, asked = make_trainer(write_least_model(tmp_path, vocab_size=48)), Asked()
    samples = random_samples(num_sessions=4)
    with closing(TorchThread()) as thread:
        learner = Learner(trainer, thread, reference=asked)
        asyncio.run(learner.train_rollout(samples, rollout_step=0, num_steps=2))
    names = list(dict.fromkeys(sample.session_id for sample in samples))
    assert asked.sessions == [set(names[:2]), set(names[2:])]


def test_the_version_goes_up_by_one_for_any_number_of_steps_even_if_all_are_skipped(tmp_path: Path) -> None:
    trainer = make_trainer(write_least_model(tmp_path, vocab_size=48))
    samples = random_samples(num_sessions=2)
    with closing(TorchThread()) as thread:
        learner = Learner(trainer, thread, version=5)
        asyncio.run(learner.train_rollout(samples, rollout_step=0, num_steps=2))
        assert learner.version == 6
        (result,) = asyncio.run(learner.train_rollout([], rollout_step=1))
        assert result.skipped and learner.version == 7
