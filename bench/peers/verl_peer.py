"""verl's side of bench/oracle.py. Runs in a Python that can import verl; see `served.serve`."""

from __future__ import annotations

import types

import torch
import verl.utils.torch_functional as verl_F
from served import Job, of_logits, serve, tensors
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig


def advantage(name):
    """Advantages of a batch of outcome rewards by one of verl's estimators."""

    def run(job: Job):
        t = tensors(job)
        options = dict(job.options)
        estimate = core_algos.get_adv_estimator_fn(name)
        if name in ("reinforce_plus_plus", "gae"):
            rewards = core_algos.compute_rewards(t.outcome, t.lo, t.lf, options["kl_coef"])
        else:
            rewards = t.outcome
        if name == "gae":
            # gae whitens what it returns; `returns` still holds the plain sums
            whitened, returns = estimate(rewards, t.values, t.mask, options["gamma"], options["lambd"])
            return {"advantages": returns - t.values, "whitened": whitened, "returns": returns}
        if name == "reinforce_plus_plus":
            config = types.SimpleNamespace(gamma=options["gamma"])
            whitened, returns = estimate(rewards, t.mask, config=config)
            return {"returns": returns, "whitened": whitened}
        return {"advantages": estimate(rewards, t.mask, index=t.group, **options)[0]}

    return run


def actor(options) -> ActorConfig:
    held = {
        "strategy": "fsdp",
        "rollout_n": 1,
        "ppo_micro_batch_size_per_gpu": 1,
        "clip_ratio": options.get("eps", 0.2),
        "clip_ratio_low": options.get("eps", 0.2),
        "clip_ratio_high": options.get("eps_high", options.get("eps", 0.2)),
        # it has no way to switch dual clip off: 1e12 is above exp(20)
        "clip_ratio_c": options.get("dual_clip", 1e12),
        "loss_scale_factor": options.get("loss_scale_factor"),
    }
    return ActorConfig(**held)


def policy_loss(name):
    """Loss and gradient of each token: what the function hands to its own reduction is looked at on the way."""

    def run(job: Job):
        t = tensors(job)
        new = t.lp.clone().requires_grad_()
        seen = []
        reduce = core_algos.agg_loss

        def spy(loss_mat, **rest):
            seen.append(loss_mat)
            return reduce(loss_mat=loss_mat, **rest)

        core_algos.agg_loss = spy
        try:
            loss = core_algos.get_policy_loss_fn(name)
            _, metrics = loss(t.lo, new, t.credit_T, t.mask, "token-mean", actor(job.options))
        finally:
            core_algos.agg_loss = reduce
        (grad,) = torch.autograd.grad(torch.where(t.mask.bool(), seen[0], 0.0).sum(), new)
        out = {"loss": seen[0], "grad": grad}
        if "actor/pg_clipfrac" in metrics:
            out["clipfrac"] = torch.tensor(metrics["actor/pg_clipfrac"])
        if "actor/ppo_kl" in metrics:
            out["ppo_kl"] = torch.tensor(metrics["actor/ppo_kl"])
        return out

    return run


def kl(job: Job):
    t = tensors(job)
    new = t.lp.clone().requires_grad_()
    value = core_algos.kl_penalty(new, t.lf, job.options["kind"])
    (grad,) = torch.autograd.grad((value * t.mask).sum(), new)
    return {"kl": value, "grad": grad}


def value_loss(job: Job):
    t = tensors(job)
    new = t.new_values.clone().requires_grad_()
    seen = []
    reduce = core_algos.agg_loss
    core_algos.agg_loss = lambda loss_mat, **rest: seen.append(loss_mat) or reduce(loss_mat=loss_mat, **rest)
    try:
        core_algos.compute_value_loss(new, t.returns, t.values, t.mask, job.options["clip"])
    finally:
        core_algos.agg_loss = reduce
    per_token = 0.5 * seen[0]
    (grad,) = torch.autograd.grad((per_token * t.mask).sum(), new)
    return {"loss": per_token, "grad": grad}


def reduction(job: Job):
    """agg_loss over all sequences at once, or as the sum over micro-batches with the numbers of the global batch."""
    t = tensors(job)
    options = job.options
    size = options.get("micro_batch_size") or len(t.mask)
    whole = {"batch_num_tokens": int(t.mask.sum()), "global_batch_size": len(t.mask)} if options["global_info"] else {}
    parts = [
        core_algos.agg_loss(
            loss_mat=t.token_losses[at : at + size],
            loss_mask=t.mask[at : at + size],
            loss_agg_mode=options["mode"],
            loss_scale_factor=options.get("loss_scale_factor"),
            **whole,
        )
        for at in range(0, len(t.mask), size)
    ]
    total = sum(parts) if options["global_info"] else sum(parts) / len(parts)
    return {"scalar": total}


def whiten(job: Job):
    t = tensors(job)
    return {"whitened": verl_F.masked_whiten(t.advantages, t.mask)}


def importance_weights(job: Job):
    t = tensors(job)
    weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
        t.lo - t.lr, t.mask, rollout_is=job.options["level"], rollout_is_threshold=job.options["threshold"]
    )
    return {"weights": weights}


def rejection(job: Job):
    t = tensors(job)
    source = getattr(t, job.options.get("policy", "lo"))
    mask, _ = rollout_corr_helper.compute_rollout_rejection_mask(
        source - t.lr, t.mask, rollout_rs=job.options["mode"], rollout_rs_threshold=job.options["threshold"]
    )
    return {"kept": mask}


JOBS = {
    **{
        f"advantage/{name}": advantage(name)
        for name in (
            "grpo",
            "grpo_vectorized",
            "rloo",
            "rloo_vectorized",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "gae",
        )
    },
    **{f"loss/{name}": policy_loss(name) for name in ("vanilla", "gspo", "cispo", "sapo", "gpg")},
    "kl": kl,
    "value_loss": value_loss,
    "reduction": reduction,
    "whiten": whiten,
    "importance_weights": importance_weights,
    "rejection": rejection,
    "entropy": of_logits("entropy", lambda logits, _: verl_F.entropy_from_logits(logits)),
    "logprobs": of_logits(
        "logprobs", lambda logits, targets: verl_F.logprobs_from_logits(logits.unsqueeze(0), targets.unsqueeze(0))[0]
    ),
}

serve(JOBS)
