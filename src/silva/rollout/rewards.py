"""The Reward stage: what the outcome of a session was, once its agent ended."""

from __future__ import annotations

from collections.abc import Sequence

from silva.state.session import Session
from silva.types.errors import SessionFailure
from silva.types.rollout import TrainingSample

Samples = tuple[TrainingSample, ...]


class OutputRewards:
    """Takes the rewards that agents wrote. `needed`: a session without one fails."""

    def __init__(self, *, needed: bool = True):
        self._needed = needed

    @property
    def group_wise(self) -> bool:
        return False

    async def judge_session(self, session: Session, samples: Samples) -> Samples:
        if self._needed and all(sample.reward is None for sample in samples):
            raise SessionFailure(
                "reward_missing",
                "the agent's output holds no reward, and no reward function is configured; let the agent write "
                '{"reward": NUMBER} to RELAX_OUTPUT_JSON',
            )
        return samples

    async def judge_group(self, ended: Sequence[tuple[Session, Samples]]) -> list[Samples | SessionFailure]:
        raise AssertionError("these rewards are given session by session")
