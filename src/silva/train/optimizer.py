"""AdamW as the trainer uses it."""

from __future__ import annotations

import math

import torch

from silva.types.errors import ConfigError


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
