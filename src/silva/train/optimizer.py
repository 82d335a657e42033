"""AdamW as the trainer uses it: what an update is told, the step's parts, its state on disk."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from silva.train.packed_model import ComputeConfig
from silva.train.packing import Reduction, check_reduction
from silva.types.errors import ConfigError, SilvaError

OPTIMIZER_FILE = "optimizer.pt"


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateConfig(ComputeConfig):
    """How a model computes and is updated.

    lr: step size where a step is not told another. weight_decay: per step, on matrices only. clip_grad: largest 2-norm
    of the gradient, 0 for no limit. max_response_len: tokens, only for the reduction seq_mean_token_sum_norm.
    """

    lr: float = 1e-6
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    clip_grad: float = 1.0
    reduction: Reduction = "session_mean"
    max_response_len: int | None = None

    def __post_init__(self) -> None:
        ComputeConfig.__post_init__(self)
        check_reduction(self.reduction, self.max_response_len)
        if not (math.isfinite(self.clip_grad) and self.clip_grad >= 0):
            raise ConfigError(f"clip_grad is {self.clip_grad}; it must be a finite number >= 0")


def build_adamw(
    model: torch.nn.Module, *, lr: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.AdamW:
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
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=betas)


def clip_gradients(model: torch.nn.Module, max_norm: float | None) -> float:
    """Scale all gradients so that their joint 2-norm is at most `max_norm` (None or 0: only measure).

    Returns the norm before the clipping; where it is not finite the gradients must not be used.
    """
    limit = max_norm if max_norm else math.inf
    return float(torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], limit))


def read_optimizer(folder: Path, config: ComputeConfig) -> dict[str, Any]:
    """What `torch.save` wrote to the optimizer file of `folder`. Raises SilvaError where it cannot be read."""
    try:
        saved = torch.load(folder / OPTIMIZER_FILE, map_location=config.torch_device, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise SilvaError(f"checkpoint {folder}: {OPTIMIZER_FILE} cannot be read: {error}") from error
    if not isinstance(saved, dict) or not {"optimizer", "num_updates", "skipped_steps"} <= saved.keys():
        raise SilvaError(f"checkpoint {folder}: {OPTIMIZER_FILE} is not of this version of Silva")
    return saved


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take the moments of a saved state; learning rate, weight decay and betas stay. Raises ValueError on a misfit."""
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)
