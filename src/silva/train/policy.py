"""The policy being trained: model, optimizer, one update per global batch, checkpoints.

Everything here blocks and belongs to one thread at a time; it knows nothing of rollouts, engines or event loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from silva.train.advantages import AdvantageConfig, TokenAdvantages, token_advantages
from silva.train.checkpoint import CheckpointState, copy_side_files, read_state, write_checkpoint, write_model_folder
from silva.train.losses.tokens import token_entropy, token_logprobs
from silva.train.objective import ObjectiveConfig, RowTokens, batch_values, row_loss
from silva.train.optimizer import ModelTrainer, UpdateConfig
from silva.train.packed_model import PackedModel, load_model
from silva.train.packing import PackedBatch, PackedRow
from silva.train.signals import Masks, PerSample, Signals
from silva.train.step_result import SkipReason, StepResult
from silva.types import SilvaError, TrainingSample


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(UpdateConfig):
    """How the policy is trained. `objective` and `advantages` say what is minimised."""

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)


class PolicyTrainer(ModelTrainer[PolicyConfig]):
    """Owns the trainable weights of one causal LM, loaded from a local Hugging Face directory.

    Raises ConfigError when the directory cannot be loaded, lacks weights, or has a model that cannot be trained in
    packed rows.
    """

    def __init__(self, hf_dir: str | Path, config: PolicyConfig | None = None) -> None:
        config = config or PolicyConfig()
        torch.manual_seed(config.seed)
        self._packed = PackedModel(hf_dir, config)
        self.model = self._packed.model
        super().__init__(Path(hf_dir), config, self.model)

    def train_step(
        self,
        samples: Sequence[TrainingSample],
        *,
        signals: Signals | None = None,
        advantages: TokenAdvantages | None = None,
        loss_masks: Masks | None = None,
        lr: float | None = None,
        measure_only: bool = False,
    ) -> StepResult:
        """One optimizer step on one global batch: `samples` with credit, all of them, packed as the config says.

        `signals` are what the objective asks for. Without `old` among them the log-probs of this very forward pass are
        those of the old policy, which is right for the first step on this data. `advantages` are made here
        where they are not given. `loss_masks` replaces the samples' masks,
        `lr` for that of the config. With `measure_only` there is no update, only its metrics. A batch without a
        trainable token, one of which OPSM or TIS left nothing, or with a loss or gradient that is not finite, changes
        nothing and is counted by reason.
        """
        self._begin(self.config.lr if lr is None else lr)
        signals = signals or Signals()
        if advantages is None:
            advantages = token_advantages(samples, self.config.advantages, signals, loss_masks=loss_masks)
        self._packed.check_ids(samples)
        batch = self._pack(samples, loss_masks, advantages.advantages)
        if batch.num_trainable == 0:
            return self._finish(batch, {}, "no_trainable_tokens")
        sums: dict[str, torch.Tensor] = {}
        for row in batch.rows:
            loss, row_sums = row_loss(self._row_tokens(row, signals), self.config.objective)
            loss.backward()
            sums = {name: value + sums[name] if name in sums else value for name, value in row_sums.items()}
        totals = {name: float(value) for name, value in sums.items()}
        values = batch_values(totals, batch.num_trainable)
        if advantages.mean_kl is not None:
            values["kl_reward"] = advantages.mean_kl
        values["grad_norm"] = self._clip()
        refusal: SkipReason | None = "critic_only" if measure_only else None
        if not totals["kept"] and not self.config.objective.has_side_terms:
            refusal = "all_rejected"
        return self._finish(batch, values, self._take(values["loss"], values["grad_norm"], refusal))

    def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        """Log-probs under the current weights, one array [T] per sample; 0.0 where the mask is 0."""
        return self._packed.compute_logprobs(samples)

    def state_dict_for_engine(self) -> dict[str, torch.Tensor]:
        """A copy of the weights under their Hugging Face names, in the compute dtype.

        Later steps do not touch it, so another thread may read it at leisure. Tied weights share one copy.
        """
        copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
        out: dict[str, torch.Tensor] = {}
        for name, tensor in self.model.state_dict().items():
            key = (tensor.data_ptr(), tensor.shape)
            if key not in copies:
                dtype = self.config.compute_dtype if tensor.is_floating_point() else tensor.dtype
                copies[key] = tensor.detach().to(dtype, copy=True)
            out[name] = copies[key]
        return out

    def save_checkpoint(
        self,
        folder: str | Path,
        *,
        step: int,
        extra: dict[str, object],
        write_more: Callable[[Path], None] | None = None,
    ) -> None:
        """Write a whole checkpoint to `folder`: a Hugging Face directory (float32 weights, tokenizer files of the model
        that training started from), the optimizer, what `write_more(folder)` adds, `step` and `extra` (JSON values). It
        appears by one rename."""
        self.config.enter_thread()

        def write_files(temporary: Path) -> None:
            self._write_hf(temporary)
            self._write_optimizer(temporary)
            if write_more is not None:
                write_more(temporary)

        write_checkpoint(Path(folder), write_files, step=step, extra=extra)

    def save_hf(self, folder: str | Path) -> None:
        """Write the weights (float32) with the tokenizer files of the start model as a Hugging Face directory.

        Other files in `folder` stay. Raises SilvaError if it is a file.
        """
        self.config.enter_thread()
        write_model_folder(Path(folder), self._write_hf)

    def _write_hf(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        copy_side_files(self.hf_dir, folder)

    def load_checkpoint(self, folder: str | Path) -> CheckpointState:
        """Take weights, optimizer state and counters from `folder`; returns its state.

        Learning rate and weight decay stay those of this trainer's config. Raises SilvaError for a folder that
        is not whole or belongs to another model; the trainer is then not to be used further.
        """
        self.config.enter_thread()
        folder = Path(folder)
        state = read_state(folder)
        saved = self._read_optimizer(folder)
        try:
            self.model.load_state_dict(load_model(folder).state_dict())
            self._restore(saved)
        except (RuntimeError, ValueError) as error:
            raise SilvaError(f"checkpoint {folder} does not fit the model {self.hf_dir}: {error}") from error
        return state

    def _row_tokens(self, row: PackedRow, signals: Signals) -> RowTokens:
        """The forward pass of a row, and what is known of its tokens."""
        logits_NV, targets_N = self._packed.forward(row)
        temperature = self.config.rollout_temperature
        new_N = token_logprobs(logits_NV, targets_N, temperature)
        with torch.set_grad_enabled(bool(self.config.objective.entropy_coef)):
            entropy_N = token_entropy(logits_NV, temperature)

        def tensor(values_N: NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(values_N).to(new_N.device, new_N.dtype)

        def gathered(values: PerSample | None) -> torch.Tensor | None:
            return None if values is None else tensor(row.gather(values))

        return RowTokens(
            new_N=new_N,
            entropy_N=entropy_N,
            rollout_N=tensor(row.rollout_logprobs_N),
            advantages_N=tensor(row.advantages_N),
            credits_N=tensor(row.credits_N),
            weights_N=tensor(row.weights_N),
            sequence_N=torch.from_numpy(row.sequence_N).to(new_N.device),
            old_N=gathered(signals.old),
            reference_N=gathered(signals.reference),
            teacher_N=gathered(signals.teacher),
            tis_weights_N=gathered(signals.tis_weights),
        )

    def _finish(self, batch: PackedBatch, values: dict[str, float], reason: SkipReason | None) -> StepResult:
        empty = {"train/empty_sessions": float(batch.num_empty_sessions)}
        return StepResult(
            metrics=self._told(values, reason) | empty,
            reason=reason,
            num_sessions=batch.num_sessions,
            num_samples=batch.num_samples,
            num_tokens=sum(row.num_tokens for row in batch.rows),
            num_trainable=batch.num_trainable,
        )
