"""What learns: the policy and the models beside it, in a thread of their own.

One call trains all that a rollout step yielded. First everything is computed that must not change while the policy does
(log-probs of the old policy, the reference and the teacher, values), then the optimizer steps follow each other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from silva.model import Unscored, tell_unscored
from silva.train.advantages import token_advantages
from silva.train.checkpoint import CheckpointState, read_state
from silva.train.critic import ValueTrainer
from silva.train.custom_tis import CustomTis
from silva.train.options import StepOptions
from silva.train.packing import leave_out_too_long, split_sessions
from silva.train.policy import PolicyTrainer
from silva.train.schedule import Schedule
from silva.train.side_scores import masks_of_scored, num_unscored, whole_or_none
from silva.train.signals import Masks, PerSample, Signals
from silva.train.staleness import fresh_masks
from silva.train.step_result import StepResult
from silva.types import ConfigError, MemoryWeights, TrainingSample

Samples = Sequence[TrainingSample]
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Scorer(Protocol):
    """Log-probs of sampled tokens under some model."""

    async def score(self, samples: Samples) -> PerSample: ...


class ComputesLogprobs(Protocol):
    """A model of this process. Blocks, in the thread of the policy."""

    def compute_logprobs(self, samples: Samples) -> PerSample: ...


log = logging.getLogger("silva.train")

CRITIC_FOLDER = "critic"
_VERSION = "weight_version"
_FINGERPRINTS = "side_models"


class TorchThread:
    """Runs blocking work, one piece after the other, in one thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="silva-train")

    async def run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(*args, **kwargs))

    def close(self) -> None:
        self._pool.shutdown(wait=True)


@dataclass(frozen=True, slots=True)
class LocalScorer:
    """A model of this process as a Scorer."""

    model: ComputesLogprobs
    """Computes the log-probs."""
    thread: TorchThread
    """The thread that it belongs to."""
    max_len: int | None = None
    """Samples of more tokens get NaN; None is no limit."""
    name: str = "the model"
    """What messages call it."""

    async def score(self, samples: Samples) -> PerSample:
        """Raises RunStopped where all samples with trainable tokens are too long."""
        limit = self.max_len
        if limit is None or all(len(sample.token_ids) <= limit for sample in samples):
            return await self.thread.run(self.model.compute_logprobs, samples)
        fit = [sample for sample in samples if len(sample.token_ids) <= limit]
        too_long = [
            Unscored(sample=sample, reason=f"it has {len(sample.token_ids)} tokens, the model takes {limit}")
            for sample in samples
            if len(sample.token_ids) > limit and any(sample.loss_mask)
        ]
        tell_unscored(self.name, too_long, len(too_long) + sum(any(sample.loss_mask) for sample in fit))
        scores = iter(await self.thread.run(self.model.compute_logprobs, fit))
        return [
            next(scores) if len(sample.token_ids) <= limit else np.full(len(sample.token_ids), np.nan)
            for sample in samples
        ]


@dataclass(eq=False)
class Learner:
    """The TrainBackend of this process. Owns the policy and what its objective needs."""

    policy: PolicyTrainer
    """The model in training."""
    thread: TorchThread
    """Everything here that blocks runs in it."""
    schedule: Schedule = field(default_factory=Schedule, kw_only=True)
    """The course of the learning rates."""
    options: StepOptions = field(default_factory=StepOptions, kw_only=True)
    """What a rollout step trains."""
    reference: Scorer | None = field(default=None, kw_only=True)
    """The reference model of the KL; None without one."""
    teacher: Scorer | None = field(default=None, kw_only=True)
    """The teacher of distillation; None without one. It may be the same object as `reference`."""
    critic: ValueTrainer | None = field(default=None, kw_only=True)
    """The value model that learns beside the policy; None without one."""
    weigh_tokens: CustomTis | None = field(default=None, kw_only=True)
    """Gives TIS weights by a user function; None without one."""
    fingerprints: Mapping[str, str] = field(default_factory=dict[str, str], kw_only=True)
    """The fingerprint of each model beside the policy, by folder. A resumed run must have the same ones."""
    version: int = field(default=0, kw_only=True)
    """The weight version in training: updates since the start model."""

    async def logprobs(self, samples: Samples) -> PerSample:
        """Log-probs under the weights in training, one array [T] per sample, 0.0 where the mask is 0."""
        return await self.thread.run(self.policy.compute_logprobs, samples)

    def leave_out_too_long(self, samples: Samples) -> tuple[list[TrainingSample], int]:
        """The samples that can be trained, and how many are too long for a row (named in the log)."""
        budget = self.policy.config.max_tokens_per_gpu
        fit, too_long = (list(samples), []) if budget is None else leave_out_too_long(samples, budget)
        for sample in too_long:
            log.warning(
                "session %s: its sample %s is left out of training (too_long): it has %d tokens, a packed row takes %d "
                "(--max-tokens-per-gpu)",
                *(sample.session_id, sample.name, len(sample.token_ids), budget),
            )
        return fit, len(too_long)

    async def train_rollout(self, samples: Samples, *, rollout_step: int, num_steps: int = 1) -> list[StepResult]:
        """All optimizer steps on the samples of one rollout: `num_steps` global batches of whole sessions.

        The metrics of each step contain the counts of the whole rollout. The version goes up by 1, even if all are
        skipped.
        """
        parts = split_sessions(samples, num_steps)
        signals, masks, counts = await self._prepare(samples, parts)
        results: list[StepResult] = []
        for step, part in enumerate(parts):
            result = await self.thread.run(
                self._step,
                [samples[i] for i in part],
                signals.of(part),
                [masks[i] for i in part],
                scale=self.schedule.scale(rollout_step, step, num_steps),
                critic_only=rollout_step < self.options.num_critic_only_steps,
            )
            results.append(replace(result, metrics=result.metrics | counts))
        self.version += 1
        return results

    async def _prepare(
        self, samples: Samples, parts: Sequence[Sequence[int]]
    ) -> tuple[Signals, Masks, dict[str, float]]:
        """Signals, the masks that the steps go by, and what was counted on the way."""
        counts: dict[str, float] = {}
        masks: Masks = [sample.loss_mask for sample in samples]
        limit = self.options.max_token_staleness
        if limit is not None:
            masks = fresh_masks(samples, version=self.version, max_staleness=limit)
            stale = sum(sample.num_trainable - sum(mask) for sample, mask in zip(samples, masks, strict=True))
            counts["train/stale_tokens"] = float(stale)
        signals = await self._signals(samples, parts)
        if signals.reference is not None:
            counts["train/reference_unscored"] = float(num_unscored(masks, signals.reference))
            masks = masks_of_scored(samples, signals.reference, masks)
        if signals.teacher is not None:
            counts["train/opd_unscored"] = float(num_unscored(masks, signals.teacher))
        if self.weigh_tokens is not None and signals.old is not None:
            weighed = await self.weigh_tokens(samples, signals.old, masks)
            signals = replace(signals, tis_weights=weighed.weights)
            counts["train/custom_tis_failed"] = float(weighed.num_failed)
        return signals, masks, counts

    async def _signals(self, samples: Samples, parts: Sequence[Sequence[int]]) -> Signals:
        """What the steps on `parts` of the samples need, before the first of them."""
        config = self.policy.config
        old: PerSample | None = None
        if config.objective.rollout_as_old:
            old = [np.asarray(sample.logprobs, dtype=np.float64) for sample in samples]
        elif len(parts) > 1 or config.advantages.kl_coef or self.weigh_tokens is not None:
            # a single step that does not need them beforehand takes those of its own forward pass
            old = await _in_parts(samples, parts, LocalScorer(self.policy, self.thread))
        reference = None if self.reference is None else await _in_parts(samples, parts, self.reference)
        teacher: PerSample | None = None
        if self.teacher is not None:
            shared = reference if self.teacher is self.reference else None
            teacher = whole_or_none(samples, shared or await self.teacher.score(samples))
        return Signals(
            old=old,
            reference=reference,
            teacher=teacher,
            values=None if self.critic is None else await self.thread.run(self.critic.compute_values, samples),
        )

    def _step(
        self,
        samples: Samples,
        signals: Signals,
        masks: Masks,
        *,
        scale: float,
        critic_only: bool,
    ) -> StepResult:
        made = token_advantages(samples, self.policy.config.advantages, signals, loss_masks=masks)
        result = self.policy.train_step(
            samples,
            signals=signals,
            advantages=made,
            loss_masks=masks,
            lr=scale * self.policy.config.lr,
            measure_only=critic_only,
        )
        if self.critic is None or result.num_trainable == 0:
            return result
        assert signals.values is not None and made.returns is not None
        metrics = self.critic.train_step(
            samples, old_values=signals.values, returns=made.returns, loss_masks=masks, lr_scale=scale
        )
        return replace(result, metrics=result.metrics | metrics)

    async def publish(self) -> MemoryWeights:
        """A copy of the policy's weights; see `PolicyTrainer.state_dict_for_engine`."""
        named = await self.thread.run(self.policy.state_dict_for_engine)
        return MemoryWeights(named=named, version=self.version)

    async def save(self, folder: Path, *, step: int, extra: dict[str, object]) -> None:
        """A whole checkpoint of all that learns, with the weight version."""
        critic = self.critic
        await self.thread.run(
            self.policy.save_checkpoint,
            folder,
            step=step,
            extra={**extra, _VERSION: self.version, _FINGERPRINTS: dict(self.fingerprints)},
            write_more=None if critic is None else lambda temporary: critic.save(temporary / CRITIC_FOLDER),
        )

    async def load(self, folder: Path) -> CheckpointState:
        """Continue from a checkpoint, at its weight version; returns its state.

        Raises ConfigError where it lacks a critic, or where a folder beside the policy now contains another model.
        """
        if self.critic is not None and not (folder / CRITIC_FOLDER).is_dir():
            raise ConfigError(
                f"checkpoint {folder} holds no critic: it is of a run without one and cannot be resumed with "
                "--advantage-estimator ppo. Resume it with the estimator that it was written with, or start a new run "
                f"from its weights with --hf-checkpoint {folder}"
            )
        fingerprints = read_state(folder).extra.get(_FINGERPRINTS)
        for path, then in (fingerprints if isinstance(fingerprints, dict) else {}).items():
            if self.fingerprints.get(path, then) != then:
                raise ConfigError(
                    f"{path} holds another model than when {folder} was written, so the KL or the distillation would "
                    "be against another one from here on. Put that one back, or name another folder with --ref-load or "
                    "--opd-teacher if this is meant"
                )
        state = await self.thread.run(self.policy.load_checkpoint, folder)
        if self.critic is not None:
            await self.thread.run(self.critic.load, folder / CRITIC_FOLDER)
        # checkpoints from before the version had a counter of its own: there it was the number of rollout steps
        version = state.extra.get(_VERSION, state.extra.get("next_rollout", 0))
        assert isinstance(version, int)
        self.version = version
        return state

    async def save_hf(self, folder: Path) -> None:
        """The policy's weights alone, in Hugging Face form."""
        await self.thread.run(self.policy.save_hf, folder)


async def _in_parts(samples: Samples, parts: Sequence[Sequence[int]], scorer: Scorer) -> PerSample:
    """The scores of all samples, packed as the steps on `parts` pack them.

    Log-probs depend on the packing in their last bits (in bfloat16 more): so a policy that was not updated yet has the
    ratio 1 to itself, and the KL 0 to a reference with its weights, exactly.
    """
    out: list[NDArray[np.floating]] = [np.empty(0)] * len(samples)
    for part in parts:
        if part:
            for i, scores_T in zip(part, await scorer.score([samples[i] for i in part]), strict=True):
                out[i] = scores_T
    return out
