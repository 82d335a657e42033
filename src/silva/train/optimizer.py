"""What training the policy and training the critic have in common: a batch in rows, one step of AdamW, its state."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypedDict, TypeVar, cast

import torch

from silva.train.options import Reduction, UpdateOptions
from silva.train.packed_model import ComputeConfig
from silva.train.packing import PackedBatch, pack_batch
from silva.train.signals import Masks, PerSample
from silva.train.step_result import SkipReason
from silva.types import ConfigError, SilvaError, TrainingSample

OPTIMIZER_FILE = "optimizer.pt"


@dataclass(frozen=True, kw_only=True)
class UpdateConfig(ComputeConfig, UpdateOptions):
    """How a model computes and is updated. Weight decay goes to matrices only; a `clip_grad` of 0 is no limit."""

    @property
    def reduction(self) -> Reduction:
        """How token losses are averaged."""
        return "per_token" if self.calculate_per_token_loss else self.loss_reduction or "session_mean"


class _Saved(TypedDict):
    """The content of `optimizer.pt`."""

    optimizer: dict[str, Any]
    num_updates: int
    skipped_steps: dict[str, int]


ConfigT = TypeVar("ConfigT", bound=UpdateConfig)


class ModelTrainer(Generic[ConfigT]):
    """A model under AdamW: a global batch in rows, one guarded step, and the optimizer's part of a checkpoint.

    The policy and the critic are two of these. Raises ConfigError for a learning rate or weight decay that is negative
    or not finite.
    """

    def __init__(self, hf_dir: Path, config: ConfigT, model: torch.nn.Module) -> None:
        self.hf_dir = hf_dir
        self.config = config
        self.num_updates = 0
        """Optimizer steps taken, over all runs that this one resumes."""
        self.skipped_steps: Counter[str] = Counter()
        """Skipped steps by reason, likewise."""
        self.optimizer = build_adamw(model, lr=config.lr, weight_decay=config.weight_decay)

    def _begin(self, lr: float) -> None:
        self.config.enter_thread()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)

    def _pack(
        self,
        samples: Sequence[TrainingSample],
        loss_masks: Masks | None,
        advantages: PerSample | None = None,
    ) -> PackedBatch:
        return pack_batch(
            samples,
            micro_batch_size=self.config.micro_batch_size,
            max_tokens=self.config.max_tokens_per_gpu,
            reduction=self.config.reduction,
            max_response_len=self.config.rollout_max_response_len,
            loss_masks=loss_masks,
            advantages=advantages,
        )

    def _clip(self) -> float:
        """Scale the gradient to `clip_grad`; its 2-norm before that, which may be no finite number."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return float(torch.nn.utils.clip_grad_norm_(parameters, self.config.clip_grad or math.inf))

    def _take(self, loss: float, grad_norm: float, refusal: SkipReason | None = None) -> SkipReason | None:
        """Take the step, unless something is not finite or refuses it: then nothing changes. Returns the reason."""
        reason = refusal
        if not math.isfinite(loss):
            reason = "nonfinite_loss"
        elif not math.isfinite(grad_norm):
            reason = "nonfinite_gradient"
        if reason is None:
            self.optimizer.step()
            self.num_updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        return reason

    def _told(self, measured: dict[str, float], reason: SkipReason | None, *, prefix: str = "") -> dict[str, float]:
        """Metrics `train/...` of a step: what is finite of `measured`, the learning rate, and why it was skipped."""
        metrics = {f"train/{name}": value for name, value in measured.items() if math.isfinite(value)}
        metrics[f"train/{prefix}lr"] = float(self.optimizer.param_groups[0]["lr"])
        if reason is not None:
            self.skipped_steps[reason] += 1
            metrics[f"train/{prefix}skipped_{reason}"] = 1.0
        return metrics

    def _write_optimizer(self, folder: Path) -> None:
        skipped = dict(self.skipped_steps)
        state = _Saved(optimizer=self.optimizer.state_dict(), num_updates=self.num_updates, skipped_steps=skipped)
        torch.save(state, folder / OPTIMIZER_FILE)

    def _read_optimizer(self, folder: Path) -> _Saved:
        """What `_write_optimizer` wrote. Raises SilvaError where it cannot be read."""
        try:
            saved = torch.load(folder / OPTIMIZER_FILE, map_location=self.config.torch_device, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise SilvaError(f"checkpoint {folder}: {OPTIMIZER_FILE} cannot be read: {error}") from error
        if not isinstance(saved, dict) or not _Saved.__required_keys__ <= saved.keys():
            raise SilvaError(f"checkpoint {folder}: {OPTIMIZER_FILE} is not of this version of Silva")
        return cast("_Saved", saved)

    def _restore(self, saved: _Saved) -> None:
        """Take moments and counters; learning rate and weight decay stay. Raises ValueError on a misfit."""
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(saved["optimizer"])
        for group, setting in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(setting)
        self.num_updates = saved["num_updates"]
        self.skipped_steps = Counter(saved["skipped_steps"])


def build_adamw(model: torch.nn.Module, *, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay acts on matrices only, never on norms and biases.

    Raises ConfigError for a learning rate or weight decay that is negative or not finite.
    """
    for value, label in ((lr, "lr"), (weight_decay, "weight_decay")):
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{label} is {value}; it must be a finite number >= 0")
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=(0.9, 0.999))
