"""SkyRL's side of bench/oracle.py. Runs in a Python that can import skyrl; see `served.serve`.

Its trainer gives the estimators the mask of all response tokens, tool results included (`response`), and the losses
that of the trainable ones (`mask`); so do the calls here.
"""

from __future__ import annotations

import types
import typing

import torch
import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # pydantic wants this one below Python 3.12

from loguru import logger  # noqa: E402
from served import Job, of_logits, serve, tensors  # noqa: E402
from skyrl.backends.skyrl_train.utils import (  # noqa: E402
    off_policy_correction_utils,
    ppo_utils,
    torch_utils,
)
from skyrl.train.config import AlgorithmConfig  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402

logger.remove()


def advantage(name):
    def run(job: Job):
        t = tensors(job)
        options = dict(job.options)
        kl_coef = options.pop("kl_coef", 0.0)
        mask = getattr(t, options.pop("mask", "response"))
        rewards = t.outcome
        if kl_coef:
            rewards = rewards - kl_coef * ppo_utils.compute_approx_kl(t.lo, t.lf, t.mask, "k1")
        advantages, returns = ppo_utils.compute_advantages_and_returns(
            rewards, mask, t.group, name, AlgorithmConfig(), values=t.values, **options
        )
        if name == "gae":
            return {"advantages": returns - t.values, "whitened": advantages, "returns": returns}
        if name == "reinforce++":
            return {"returns": returns, "whitened": advantages}
        return {"advantages": advantages}

    return run


def config_of(options) -> AlgorithmConfig:
    config = AlgorithmConfig()
    config.policy_loss_type = "dual_clip" if "dual_clip" in options else "regular"
    config.clip_ratio_c = options.get("dual_clip", 3.0)
    config.eps_clip_low = options.get("eps", 0.2)
    config.eps_clip_high = options.get("eps_high", config.eps_clip_low)
    config.cispo.cispo_eps_clip_low, config.cispo.cispo_eps_clip_high = config.eps_clip_low, config.eps_clip_high
    config.loss_reduction = "sequence_mean"
    return config


def policy_loss(name):
    def run(job: Job):
        t = tensors(job)
        new = t.lp.clone().requires_grad_()
        seen = []
        reduce = ppo_utils.reduce_loss
        ppo_utils.reduce_loss = lambda loss, mask: seen.append(loss) or reduce(loss, mask)
        try:
            loss = ppo_utils.PolicyLossRegistry.get(name)
            _, metrics = loss(new, t.lo, t.credit_T, config_of(job.options), t.mask)
        finally:
            ppo_utils.reduce_loss = reduce
        (grad,) = torch.autograd.grad((seen[0] * t.mask).sum(), new)
        return {"loss": seen[0], "grad": grad, "clipfrac": torch.tensor(metrics["clip_ratio"])}

    return run


def kl(job: Job):
    t = tensors(job)
    new = t.lp.clone().requires_grad_()
    value = ppo_utils.compute_approx_kl(new, t.lf, t.mask, job.options["kind"])
    (grad,) = torch.autograd.grad(value.sum(), new)
    return {"kl": value, "grad": grad}


def value_loss(job: Job):
    """Per token: the function called with each token as a batch of its own."""
    t = tensors(job)
    new = t.new_values.clone().requires_grad_()
    config = AlgorithmConfig()
    config.value_clip = job.options["clip"]
    one = torch.ones(1, 1)
    rows = [
        [
            ppo_utils.ppo_critic_loss(
                new[b : b + 1, k : k + 1],
                t.values[b : b + 1, k : k + 1],
                t.returns[b : b + 1, k : k + 1],
                config,
                one,
            )[0]
            for k in range(new.shape[1])
        ]
        for b in range(new.shape[0])
    ]
    per_token = torch.stack([torch.stack(row) for row in rows])
    (grad,) = torch.autograd.grad((per_token * t.mask).sum(), new)
    return {"loss": per_token, "grad": grad}


def reduction(job: Job):
    """Its trainer scales advantages so that plain sums give the mean: here a loss of 1 times the scaled number."""
    t = tensors(job)
    scaled = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
        t.token_losses,
        t.mask,
        job.options["mode"],
        job.options.get("micro_batch_size") or len(t.mask),
        job.options.get("max_seq_len"),
    )
    return {"scalar": ppo_utils.reduce_loss(scaled, t.mask)}


def side_term(job: Job):
    """A KL or entropy term as its worker adds it up: a mean of each micro-batch, then over micro-batches."""
    t = tensors(job)
    size = job.options["micro_batch_size"]
    dim = -1 if job.options["term"] == "kl" else None
    parts = [
        torch_utils.masked_mean(t.token_losses[at : at + size], t.mask[at : at + size], dim=dim).mean()
        for at in range(0, len(t.mask), size)
    ]
    return {"scalar": sum(parts) / len(parts)}


def whiten(job: Job):
    t = tensors(job)
    return {"whitened": ppo_utils.masked_whiten(t.advantages, t.mask)}


def batch_normalize(job: Job):
    """`advantage_batch_normalize`: the method of its trainer on an object that holds the options it reads."""
    t = tensors(job)
    algorithm = AlgorithmConfig()
    algorithm.advantage_batch_normalize = True
    settings = types.SimpleNamespace(algorithm=algorithm, micro_train_batch_size_per_gpu=len(t.mask))
    trainer = types.SimpleNamespace(cfg=types.SimpleNamespace(trainer=settings))
    data = {"advantages": t.advantages * t.response, "response_mask": t.response, "loss_mask": t.mask}
    normalized = RayPPOTrainer._normalize_advantages(trainer, Sliced(data), [(0, len(t.mask))])
    return {"whitened": normalized["advantages"] * t.mask.sum()}


class Sliced(dict):
    def __getitem__(self, key):
        return (
            {name: value[key] for name, value in self.items()} if isinstance(key, slice) else super().__getitem__(key)
        )


def importance_weights(job: Job):
    """The factor on each token's loss: TIS ratio times what the masks leave."""
    t = tensors(job)
    config = AlgorithmConfig().off_policy_correction
    for name, value in job.options.items():
        setattr(config, name, value)
    ratio, _, mask = off_policy_correction_utils.compute_off_policy_correction(t.lo, t.lr, t.mask, config)
    weights = (torch.ones_like(t.lo) if ratio is None else ratio) * mask
    return {"weights": weights, "kept": (mask != 0).double()}


JOBS = {
    **{f"advantage/{name}": advantage(name) for name in ("grpo", "rloo", "reinforce++", "gae", "maxrl")},
    **{f"loss/{name}": policy_loss(name) for name in ("regular", "dual_clip", "gspo", "cispo", "sapo")},
    "kl": kl,
    "value_loss": value_loss,
    "reduction": reduction,
    "side_term": side_term,
    "whiten": whiten,
    "batch_normalize": batch_normalize,
    "importance_weights": importance_weights,
    "entropy": of_logits(
        "entropy",
        lambda logits, _: torch_utils.chunked_entropy_from_logits(logits.unsqueeze(0), requires_grad=True)[0],
    ),
    "logprobs": of_logits(
        "logprobs",
        lambda logits, targets: torch_utils.logprobs_from_logits(logits.unsqueeze(0), targets.unsqueeze(0))[0],
    ),
}

serve(JOBS)
