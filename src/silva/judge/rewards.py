"""The Reward stage: what the outcome of a session was, once its agent ended.

The agent's own reward is used as it is. The user's reward function (`--custom-rm-path`) fills what is missing, session
by session; with `--group-rm` it judges all contexts of a group at once, and may overwrite.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any

from silva.credit import Reward, read_reward
from silva.judge.options import RewardOptions
from silva.judge.sample_views import Decode, sample_view
from silva.judge.user_function import UserCodeError, UserFunction
from silva.turns import Session
from silva.types import GroupEnd, Mode, OptionsView, Samples, SampleView, SessionFailure, TrainingSample, shown, spread
from silva.wire import OutputDocument, parse_output

log = logging.getLogger("silva.rollout")

RM_PARAMS = ("args", "sample")
GROUP_RM_PARAMS = ("args", "samples")
_MAX_READ_AGAIN = 1 << 16
"""Bytes of an output that an error may take the time to read once more."""


@dataclass(eq=False)
class Rewards:
    """Gives sessions their rewards.

    Consumes exported contexts of sessions that ended; waits for the user's function, where there is one; produces the
    contexts with their rewards, each matched by its place in the call that asked for it.
    """

    options: RewardOptions
    """The function receives all of them as `args`."""
    _: KW_ONLY
    function: UserFunction | None
    """None where rewards come from the agents alone."""
    decode: Decode
    """Ids to text, special tokens included."""

    def __post_init__(self) -> None:
        assert self.function is not None or not self.options.group_rm
        self._args = OptionsView(asdict(self.options))
        self._latencies_s: list[float] = []
        self._num_overwritten = 0

    @property
    def group_wise(self) -> bool:
        return self.options.group_rm

    def take_numbers(self) -> dict[str, float]:
        """Metrics since this was asked last: agents' rewards that a group function replaced, seconds a call took."""
        numbers: dict[str, float] = {}
        if self.group_wise:
            numbers["rollout/rewards_overwritten"] = float(self._num_overwritten)
        if self._latencies_s:
            numbers |= spread("reward/latency_s", self._latencies_s)
        self._latencies_s, self._num_overwritten = [], 0
        return numbers

    async def judge_session(self, session: Session, samples: Samples) -> Samples:
        """The contexts of one session with their rewards.

        Raises SessionFailure: `reward_failed` where the function gave no value, `reward_invalid` where it is none to
        train on, `reward_missing` where nobody gave one.
        """
        assert not self.group_wise, "these rewards are given to whole groups"
        if self.function is not None:
            asked = [index for index, sample in enumerate(samples) if sample.reward is None]
            if self.options.agentic_credit is not None:  # contexts share the session's reward
                asked = [0] if len(asked) == len(samples) else []
            judged = await asyncio.gather(*(self._judge(session, samples[index]) for index in asked))
            filled = list(samples)
            for index, verdict in zip(asked, judged, strict=True):
                if isinstance(verdict, SessionFailure):
                    raise verdict
                filled[index] = verdict
            samples = tuple(filled)
        self._check_given(session, samples)
        return samples

    async def judge_group(
        self, ended: Sequence[tuple[Session, Samples]], failed_slots: Mapping[int, str]
    ) -> list[Samples | SessionFailure]:
        """The same for the sessions of a group, with one call. A None in its list leaves what the agent gave.

        Raises GroupEnd: `group_reward_failed` where the function gave no value, `group_reward_invalid` where it is no
        list of one value a context.
        """
        flat = [(session, sample) for session, samples in ended for sample in samples]
        views = [await self._view(session, sample, failed_slots) for session, sample in flat]
        try:
            values = await self._ask(views)
        except UserCodeError as error:
            raise GroupEnd("group_reward_failed", str(error)) from error
        assert self.function is not None
        if not isinstance(values, list) or len(values) != len(flat):
            what = f"{len(values)} values" if isinstance(values, list) else f"a {type(values).__name__}"
            raise GroupEnd(
                "group_reward_invalid",
                f"{self.function.path} returned {what} for {len(flat)} contexts of {len(ended)} sessions; with "
                "--group-rm it must return a list with one value a context",
            )
        left = iter(values)
        return [self._take(session, samples, [next(left) for _ in samples]) for session, samples in ended]

    def _take(self, session: Session, samples: Samples, values: Sequence[object]) -> Samples | SessionFailure:
        """One session's part of what a group function returned."""
        judged: list[TrainingSample] = []
        try:
            for sample, value in zip(samples, values, strict=True):
                if value is not None and sample.reward is not None and session.mode == "train":
                    self._num_overwritten += 1
                judged.append(sample if value is None else self._with(sample, self._read(sample, value, session.mode)))
            self._check_given(session, judged)
        except SessionFailure as failure:
            return failure
        return tuple(judged)

    async def _judge(self, session: Session, sample: TrainingSample) -> TrainingSample | SessionFailure:
        """One context, by the function. A failure is a value here: contexts of a session are judged at once."""
        view = await self._view(session, sample)
        try:
            value = await self._ask(view)
        except UserCodeError as error:
            score = self.options.reward_failure_score
            if score is None:
                return SessionFailure("reward_failed", f"{sample.place}: {error}")
            log.warning("%s gets --reward-failure-score %g: %s", sample.place, score, error)
            return self._with(sample, Reward(value=score))
        if value is None:
            lacks = f"{self._path} gave none; it must return a number"
            return SessionFailure("reward_invalid", f"the reward of {sample.place} is None: {lacks}")
        try:
            return self._with(sample, self._read(sample, value, session.mode))
        except SessionFailure as failure:
            return failure

    async def _ask(self, views: SampleView | list[SampleView]) -> Any:
        """The function's value; after a failure it is asked again. Raises UserCodeError."""
        assert self.function is not None
        for num_left in range(self.options.reward_retries, -1, -1):
            began_s = time.monotonic()
            try:
                return await self.function(self._args, views)
            except UserCodeError as error:
                if not num_left:
                    raise
                log.warning("%s, asked again: %s", self._path, error)
            finally:
                self._latencies_s.append(time.monotonic() - began_s)
        raise AssertionError("the last try returns or raises")

    async def _view(
        self, session: Session, sample: TrainingSample, failed_slots: Mapping[int, str] | None = None
    ) -> SampleView:
        return await asyncio.to_thread(sample_view, session, sample, self.decode, failed_slots)

    def _read(self, sample: TrainingSample, value: object, mode: Mode) -> Reward:
        where = f"{sample.place} (from {self._path})"
        return read_reward(value, where, self.options.reward_key_of(mode), allow_bool=True)

    def _with(self, sample: TrainingSample, reward: Reward) -> TrainingSample:
        return replace(sample, reward=reward.value, helpers={**sample.helpers, **reward.helpers})

    @property
    def _path(self) -> str:
        return "" if self.function is None else self.function.path

    def _check_given(self, session: Session, samples: Sequence[TrainingSample]) -> None:
        if self.options.has_custom_advantage or any(sample.reward is not None for sample in samples):
            return
        lacks = f"{self._path} gave it none" if self._path else "no reward function is configured (--custom-rm-path)"
        what, remedy = _without_reward(session, samples)
        raise SessionFailure("reward_missing", f"{what}, and {lacks}; {remedy}, or a reward function give one")


def _without_reward(session: Session, samples: Sequence[TrainingSample]) -> tuple[str, str]:
    """What the agent wrote instead of a reward, and what it could have written."""
    output = session.output or b""
    document = parse_output(output) if len(output) <= _MAX_READ_AGAIN else OutputDocument()
    if document.records or b'"messages"' in output:
        names = ", ".join(repr(sample.name) for sample in samples[:4]) + (", ..." if len(samples) > 4 else "")
        what = f"no record of the agent ({names}) holds a reward"
        return what, 'let the agent write "reward": NUMBER into one of them, beside its name and messages'
    remedy = 'let the agent write {"reward": NUMBER} to RELAX_OUTPUT_JSON'
    if not output.strip():
        return "the agent wrote no output", remedy
    others = f" (it holds {', '.join(map(shown, document.ignored[:8]))})" if document.ignored else ""
    return f"the output of the agent holds no reward{others}", remedy
