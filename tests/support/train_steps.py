"""Steps of real trainers, and what their definition says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from silva.train.options import ClipOptions
from silva.train.policy import PolicyConfig, PolicyTrainer
from silva.train.step_result import StepResult
from silva.types.rollout import TrainingSample

Gradients = list[torch.Tensor]
TokenLoss = Callable[[torch.Tensor, float, float, torch.Tensor, ClipOptions], tuple[torch.Tensor, bool]]
"""Loss of one token and whether the clip range decided: of its new log-prob (a scalar with gradient) and old log-prob,
its advantage, and the mean of (new - old) over its sequence (with gradient)."""


def make_trainer(hf_dir: Path, **settings: Any) -> PolicyTrainer:
    return PolicyTrainer(hf_dir, PolicyConfig(**({"lr": 0.0, "clip_grad": 0.0, "device": "cpu"} | settings)))


def step_with_gradients(
    trainer: PolicyTrainer, samples: Sequence[TrainingSample], **kwargs: Any
) -> tuple[StepResult, Gradients]:
    """A step, and the gradient that reached the optimizer."""
    seen: Gradients = []

    def hook(*_: Any) -> None:
        for group in trainer.optimizer.param_groups:
            seen.extend(p.grad.detach().clone() for p in group["params"])

    handle = trainer.optimizer.register_step_pre_hook(hook)
    result = trainer.train_step(samples, **kwargs)
    handle.remove()
    return result, seen


def old_policy(samples: Sequence[TrainingSample], trainer: PolicyTrainer, spread: float = 0.4) -> list[np.ndarray]:
    """Log-probs of an older policy: those of today, moved enough that some ratios are clipped."""
    rng = np.random.default_rng(9)
    now = trainer.compute_logprobs(samples)
    return [values + rng.normal(size=len(values)) * spread for values in now]


def surrogate(ratio: torch.Tensor, advantage: float, clip: ClipOptions) -> tuple[torch.Tensor, bool]:
    high = clip.eps_clip if clip.eps_clip_high is None else clip.eps_clip_high
    plain, clipped = -ratio * advantage, -min(max(ratio.item(), 1 - clip.eps_clip), 1 + high) * advantage
    loss, won = (plain, False) if plain.item() >= clipped else (torch.tensor(clipped, dtype=plain.dtype), True)
    if clip.eps_clip_c is not None and advantage < 0 and loss.item() > -clip.eps_clip_c * advantage:
        loss = torch.tensor(-clip.eps_clip_c * advantage, dtype=plain.dtype)
    return loss, won


def ppo_clip_of_token(
    new: torch.Tensor, old: float, advantage: float, _: torch.Tensor, clip: ClipOptions
) -> tuple[torch.Tensor, bool]:
    return surrogate((new - old).clamp(-20, 20).exp(), advantage, clip)


@dataclass(frozen=True, kw_only=True, slots=True)
class DefinedStep:
    """Metrics by their name behind `train/`; the gradient by the name of the weights."""

    metrics: dict[str, float]
    gradient: dict[str, torch.Tensor]


def defined_step(
    hf_dir: Path,
    samples: Sequence[TrainingSample],
    old: Sequence[np.ndarray],
    config: PolicyConfig,
    *,
    token_loss: TokenLoss = ppo_clip_of_token,
    advantages: Sequence[Sequence[float]] | None = None,
) -> DefinedStep:
    """A step from the definitions: float64, transformers' own attention, one sample and one token at a time.

    `advantages`: those of the trainable tokens of each sample; None takes the credit of the sample.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(hf_dir, attn_implementation="eager", dtype=torch.float64)
    per_session: dict[str, list[torch.Tensor]] = {}
    sums = dict.fromkeys(("ppo_kl", "pg_clipfrac", "entropy", "rollout_logprob_abs_diff"), 0.0)
    for i, (sample, old_T) in enumerate(zip(samples, old, strict=True)):
        logits_TV = model(input_ids=torch.tensor([sample.token_ids])).logits[0] / (config.rollout_temperature or 1.0)
        places = np.flatnonzero(sample.loss_mask).tolist()
        logs = [logits_TV[t - 1].double().log_softmax(dim=0) for t in places]
        news = [log_V[sample.token_ids[t]] for t, log_V in zip(places, logs, strict=True)]
        mean = torch.stack([new - old_T[t] for t, new in zip(places, news, strict=True)]).mean()
        for n, (t, new, log_V) in enumerate(zip(places, news, logs, strict=True)):
            advantage = sample.credit if advantages is None else advantages[i][n]
            assert advantage is not None
            loss, won = token_loss(new, float(old_T[t]), float(advantage), mean, config.objective.clip)
            per_session.setdefault(sample.session_id, []).append(loss)
            sums["ppo_kl"] += old_T[t] - new.item()
            sums["pg_clipfrac"] += won
            sums["entropy"] += -(log_V.exp() * log_V).sum().item()
            sums["rollout_logprob_abs_diff"] += abs(old_T[t] - sample.logprobs[t])
    sessions = [torch.stack(losses) for losses in per_session.values()]
    num_tokens = sum(map(len, sessions))
    loss = {
        "session_mean": sum(losses.mean() for losses in sessions) / len(sessions),
        "per_token": sum(losses.sum() for losses in sessions) / num_tokens,
        "seq_mean_token_sum_norm": sum(losses.sum() / (config.rollout_max_response_len or 1) for losses in sessions)
        / len(sessions),
    }[config.reduction]
    loss.backward()
    gradient = {name: p.grad for name, p in model.named_parameters()}
    norm = sum(g.square().sum().item() for g in gradient.values()) ** 0.5
    means = {name: value / num_tokens for name, value in sums.items()}
    totals = {"loss": loss.item(), "pg_loss": loss.item(), "grad_norm": norm}
    return DefinedStep(metrics=means | totals, gradient=gradient)
