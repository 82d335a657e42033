"""The policy being trained: model, optimizer, one update per global batch, checkpoints.

Everything here blocks and belongs to one thread at a time; it knows nothing of rollouts, engines or event loops.
"""

from __future__ import annotations

import logging
import math
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from silva.train.attention import PACKED_ATTENTION, check_packed_attention, packed_forward, register_packed_attention
from silva.train.checkpoint import copy_side_files, read_state, write_checkpoint, write_model_folder
from silva.train.losses import ClipConfig, ppo_clip, token_entropy, token_logprobs
from silva.train.optimizer import build_adamw, clip_gradients
from silva.train.packing import (
    PackedBatch,
    PackedRow,
    Reduction,
    check_reduction,
    check_row_size,
    leave_out_too_long,
    pack_batch,
    split_sessions,
)
from silva.types.errors import ConfigError, SilvaError
from silva.types.rollout import TrainingSample

log = logging.getLogger("silva.train")

Dtype = Literal["float32", "bfloat16"]
SkipReason = Literal["no_trainable_tokens", "nonfinite_loss", "nonfinite_gradient"]

OPTIMIZER_FILE = "optimizer.pt"
_SUMS = ("pg_loss", "ppo_kl", "pg_clipfrac", "entropy", "rollout_logprob_abs_diff")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """How the policy is trained.

    dtype: what forward and backward compute in; the weights themselves and the optimizer are always float32. None is
    bfloat16 on CUDA and float32 elsewhere. lr: step size, constant. weight_decay: per step, on matrices only.
    clip_grad: largest 2-norm of the gradient, 0 for no limit. temperature: that of the rollout. micro_batch_size:
    samples per forward pass. max_tokens: instead, as many samples as fit into this many tokens; none of the samples may
    have more. max_response_len: tokens, only for the reduction seq_mean_token_sum_norm. num_threads:
    torch threads of the calling thread, None leaves them. device: torch name, None is CUDA where there is one. seed: of
    torch.
    """

    dtype: Dtype | None = None
    lr: float = 1e-6
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    clip_grad: float = 1.0
    clip: ClipConfig = field(default_factory=ClipConfig)
    temperature: float = 1.0
    micro_batch_size: int = 1
    max_tokens: int | None = None
    reduction: Reduction = "session_mean"
    max_response_len: int | None = None
    num_threads: int | None = None
    device: str | None = None
    seed: int = 1234

    def __post_init__(self) -> None:
        check_reduction(self.reduction, self.max_response_len)
        if self.dtype is not None and self.dtype not in get_args(Dtype):
            raise ConfigError(f"dtype is {self.dtype!r}; choose one of {', '.join(get_args(Dtype))}")
        if not (math.isfinite(self.clip_grad) and self.clip_grad >= 0):
            raise ConfigError(f"clip_grad is {self.clip_grad}; it must be a finite number >= 0")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature is {self.temperature}; it must be a finite number >= 0")
        check_row_size(self.micro_batch_size, self.max_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimizer step did. `metrics` (names `train/...`) holds finite numbers only.

    `reason` tells why the step was skipped, that is, why weights and optimizer are what they were before; None for a
    step that was taken. `num_tokens` counts all tokens that went through the model, `num_trainable` those with a loss.
    """

    metrics: dict[str, float]
    reason: SkipReason | None
    num_sessions: int
    num_samples: int
    num_tokens: int
    num_trainable: int

    @property
    def skipped(self) -> bool:
        return self.reason is not None


class PolicyTrainer:
    """Owns the trainable weights of one causal LM, loaded from a local Hugging Face directory.

    Raises ConfigError when the directory cannot be loaded, lacks weights, or holds a model that cannot be trained in
    packed rows.
    """

    def __init__(self, hf_dir: str | Path, config: PolicyConfig | None = None) -> None:
        self.config = config or PolicyConfig()
        self.hf_dir = Path(hf_dir)
        self.num_updates = 0
        """Optimizer steps taken, over all runs that this one resumes."""
        self.skipped_steps: Counter[str] = Counter()
        """Skipped steps by reason, likewise."""
        self._device = torch.device(self.config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        default: Dtype = "bfloat16" if self._device.type == "cuda" else "float32"
        self._compute_dtype = torch.bfloat16 if (self.config.dtype or default) == "bfloat16" else torch.float32
        self._enter_thread()
        torch.manual_seed(self.config.seed)
        self.model = _load_model(self.hf_dir)
        torch.nn.Module.to(self.model, self._device)
        check_packed_attention(self.model)
        self.optimizer = build_adamw(
            self.model, lr=self.config.lr, weight_decay=self.config.weight_decay, betas=self.config.betas
        )

    def train_step(
        self,
        samples: Sequence[TrainingSample],
        *,
        old_logprobs: Sequence[NDArray[np.floating]] | None = None,
        loss_masks: Sequence[Sequence[int]] | None = None,
    ) -> StepResult:
        """One optimizer step on one global batch: `samples` with credit, all of them, packed as the config says.

        `old_logprobs` (one array a sample, of its length, as `compute_logprobs` returns them) are the log-probs under
        the policy before the first update on this data; None takes those of this very forward pass, which is right for
        the first step. `loss_masks` stands in for the samples' masks. A batch without a trainable token, or with a loss
        or gradient that is not finite, changes nothing and is counted by reason.
        """
        self._enter_thread()
        batch = self._pack(samples, loss_masks)
        if batch.num_trainable == 0:
            return self._finish(batch, {}, "no_trainable_tokens")
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=self._device)
        for row in batch.rows:
            loss, row_sums = self._row_loss(row, None if old_logprobs is None else row.gather(old_logprobs))
            loss.backward()
            sums += row_sums
        pg_loss, *totals = sums.tolist()
        means = [total / batch.num_trainable for total in totals]
        grad_norm = clip_gradients(self.model, self.config.clip_grad)
        values = dict(zip(_SUMS, [pg_loss, *means], strict=True)) | {"loss": pg_loss, "grad_norm": grad_norm}
        reason: SkipReason | None = None
        if not math.isfinite(pg_loss):
            reason = "nonfinite_loss"
        elif not math.isfinite(grad_norm):
            reason = "nonfinite_gradient"
        else:
            self.optimizer.step()
            self.num_updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        return self._finish(batch, values, reason)

    def leave_out_too_long(self, samples: Sequence[TrainingSample]) -> tuple[list[TrainingSample], int]:
        """What of a rollout can be trained, and how many samples are too long for a row (named in the log).

        Goes before everything that counts sessions or tokens.
        """
        budget = self.config.max_tokens
        if budget is None:
            return list(samples), 0
        fit, too_long = leave_out_too_long(samples, budget)
        for sample in too_long:
            log.warning(
                "session %s: its sample %s is left out of training (too_long): it has %d tokens, a packed row takes %d "
                "(--max-tokens-per-gpu)",
                sample.session_id,
                sample.name,
                len(sample.token_ids),
                budget,
            )
        return fit, len(too_long)

    def train_rollout(self, samples: Sequence[TrainingSample], *, num_steps: int = 1) -> list[StepResult]:
        """All optimizer steps on the samples of one rollout: `num_steps` global batches of whole sessions.

        With more than one step, the old log-probs are computed once, before the first update.
        """
        parts = split_sessions(samples, num_steps)
        if num_steps == 1:
            return [self.train_step(samples)]
        old = self.compute_logprobs(samples)
        return [self.train_step([samples[i] for i in part], old_logprobs=[old[i] for i in part]) for part in parts]

    def compute_logprobs(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        """Log-probs under the current weights, one array a sample, of its length; 0.0 where the mask is 0."""
        self._enter_thread()
        out = [np.zeros(len(sample.token_ids), dtype=np.float32) for sample in samples]
        with torch.no_grad():
            for row in self._pack(samples, None).rows:
                logits_NV, targets_N = self._forward(row)
                row.scatter(token_logprobs(logits_NV, targets_N, self.config.temperature).cpu().numpy(), out)
        return out

    def state_dict_for_engine(self) -> dict[str, torch.Tensor]:
        """A copy of the weights under their Hugging Face names, in the compute dtype.

        Later steps do not touch it, so another thread may read it at leisure. Tied weights share one copy.
        """
        copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
        out: dict[str, torch.Tensor] = {}
        for name, tensor in self.model.state_dict().items():
            key = (tensor.data_ptr(), tensor.shape)
            if key not in copies:
                dtype = self._compute_dtype if tensor.is_floating_point() else tensor.dtype
                copies[key] = tensor.detach().to(dtype, copy=True)
            out[name] = copies[key]
        return out

    def save_checkpoint(self, folder: str | Path, *, step: int, extra: dict[str, Any]) -> None:
        """Write a whole checkpoint to `folder`: a Hugging Face directory (float32 weights, tokenizer files of the model
        that training started from), the optimizer, `step` and `extra` (JSON values). It appears by one rename."""
        self._enter_thread()

        def write_files(temporary: Path) -> None:
            self._write_hf(temporary)
            state = {
                "optimizer": self.optimizer.state_dict(),
                "num_updates": self.num_updates,
                "skipped_steps": dict(self.skipped_steps),
            }
            torch.save(state, temporary / OPTIMIZER_FILE)

        write_checkpoint(Path(folder), write_files, step=step, extra=extra)

    def save_hf(self, folder: str | Path) -> None:
        """Write the weights (float32) with the tokenizer files of the start model as a Hugging Face directory.

        Other files that `folder` holds stay. Raises SilvaError if it is a file.
        """
        self._enter_thread()
        write_model_folder(Path(folder), self._write_hf)

    def _write_hf(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        copy_side_files(self.hf_dir, folder)

    def load_checkpoint(self, folder: str | Path) -> dict[str, Any]:
        """Take weights, optimizer state and counters from `folder`; returns its state with `step` and `extra`.

        Learning rate, weight decay and betas stay those of this trainer's config. Raises SilvaError for a folder that
        is not whole or belongs to another model; the trainer is then not to be used further.
        """
        self._enter_thread()
        folder = Path(folder)
        state = read_state(folder)
        try:
            saved = torch.load(folder / OPTIMIZER_FILE, map_location=self._device, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise SilvaError(f"checkpoint {folder}: {OPTIMIZER_FILE} cannot be read: {error}") from error
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        try:
            self.model.load_state_dict(_load_model(folder).state_dict())
            self.optimizer.load_state_dict(saved["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise SilvaError(f"checkpoint {folder} does not fit the model {self.hf_dir}: {error}") from error
        for group, setting in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(setting)
        self.num_updates = saved["num_updates"]
        self.skipped_steps = Counter(saved["skipped_steps"])
        return state

    def _enter_thread(self) -> None:
        # torch keeps its thread count per calling thread, and each call may come from another one
        if self.config.num_threads is not None:
            torch.set_num_threads(self.config.num_threads)

    def _pack(self, samples: Sequence[TrainingSample], loss_masks: Sequence[Sequence[int]] | None) -> PackedBatch:
        vocab_size = self.model.config.get_text_config().vocab_size
        for sample in samples:
            low, high = min(sample.token_ids), max(sample.token_ids)
            if low < 0 or high >= vocab_size:
                raise SilvaError(
                    f"sample {sample.session_id}/{sample.name} holds token id {low if low < 0 else high}; "
                    f"the model {self.hf_dir} has ids 0 to {vocab_size - 1}"
                )
        return pack_batch(
            samples,
            micro_batch_size=self.config.micro_batch_size,
            max_tokens=self.config.max_tokens,
            reduction=self.config.reduction,
            max_response_len=self.config.max_response_len,
            loss_masks=loss_masks,
        )

    def _forward(self, row: PackedRow) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [N, vocab] and ids [N] of the row's trainable tokens."""
        token_ids_T, predict_N, targets_N = (
            torch.from_numpy(values).to(self._device) for values in (row.token_ids_T, row.predict_N, row.targets_N)
        )
        narrow = self._compute_dtype != torch.float32
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=narrow):
            logits_NV = packed_forward(self.model, token_ids_T, row.document_lengths, predict_N)
        return logits_NV, targets_N

    def _row_loss(self, row: PackedRow, old_N: NDArray[np.float64] | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The row's share of the loss, and its sums for `_SUMS` (float64, without gradient)."""
        logits_NV, targets_N = self._forward(row)
        temperature = self.config.temperature
        new_N = token_logprobs(logits_NV, targets_N, temperature)

        def tensor(values_N: NDArray[np.float64]) -> torch.Tensor:
            return torch.from_numpy(values_N).to(self._device, new_N.dtype)

        before_N = new_N.detach() if old_N is None else tensor(old_N)
        losses_N, clipped_N = ppo_clip(new_N, before_N, tensor(row.advantages_N), self.config.clip)
        loss = (losses_N * tensor(row.weights_N)).sum()
        with torch.no_grad():
            sums = (
                loss,
                (before_N - new_N).sum(),
                clipped_N.sum(),
                token_entropy(logits_NV, temperature).sum(),
                (before_N - tensor(row.rollout_logprobs_N)).abs().sum(),
            )
            return loss, torch.stack([value.double() for value in sums])

    def _finish(self, batch: PackedBatch, values: dict[str, float], reason: SkipReason | None) -> StepResult:
        metrics = {f"train/{name}": value for name, value in values.items() if math.isfinite(value)}
        metrics["train/lr"] = float(self.optimizer.param_groups[0]["lr"])
        metrics["train/empty_sessions"] = float(batch.num_empty_sessions)
        if reason is not None:
            self.skipped_steps[reason] += 1
            metrics[f"train/skipped_{reason}"] = 1.0
        return StepResult(
            metrics=metrics,
            reason=reason,
            num_sessions=batch.num_sessions,
            num_samples=batch.num_samples,
            num_tokens=sum(row.num_tokens for row in batch.rows),
            num_trainable=batch.num_trainable,
        )


def _load_model(hf_dir: Path) -> PreTrainedModel:
    """The model in float32 with packed attention, all weights from the directory."""
    register_packed_attention()
    if not (hf_dir / "config.json").is_file():
        raise ConfigError(f"{hf_dir} is not a Hugging Face model directory: it holds no config.json")
    # the run has a progress display of its own
    transformers_logging.disable_progress_bar()
    auto: Any = AutoModelForCausalLM
    try:
        model, info = auto.from_pretrained(
            hf_dir,
            dtype=torch.float32,
            attn_implementation=PACKED_ATTENTION,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(f"the model in {hf_dir} cannot be loaded: {type(error).__name__}: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(f"the model in {hf_dir} lacks the weights {', '.join(missing[:5])} ({len(missing)} in all)")
    # no dropout: rollout and training must see the same policy
    return model.eval()
