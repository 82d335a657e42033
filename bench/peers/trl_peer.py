"""TRL's side of bench/oracle.py. Runs in a Python that can import trl; see `served.serve`.

TRL has its formulas inside two methods of its trainers, so these are called on a trainer that was never initialised:
it gets the attributes that the methods read, log-probs come from the case in place of a model, and rewards in place of
reward functions. Everything else that runs is TRL's own.
"""

from __future__ import annotations

import math
import types
from collections import defaultdict

import torch
from served import Job, of_logits, serve, tensors
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax


class Alone:
    """An accelerator of one process."""

    device = torch.device("cpu")
    num_processes = 1
    process_index = 0

    def gather(self, value):
        return value

    gather_for_metrics = gather

    def reduce(self, value, reduction):
        return value


def trainer(kind, **held):
    """A trainer of that class with the attributes that the two methods read."""
    one = object.__new__(kind)
    args = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 10**6,
        "gradient_checkpointing_kwargs": None,
        "report_to": [],
    }
    plain = {
        "accelerator": Alone(),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "loss_type": "dapo",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "model": types.SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": 1,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "_is_vlm": False,
        "pad_to_multiple_of": None,
        "_tokenizer": types.SimpleNamespace(pad_token_id=0),
        "mask_truncated_completions": False,
        "num_iterations": 1,
        "multi_objective_aggregation": "sum_then_normalize",
        "scale_rewards": "group",
        "reward_weights": torch.ones(1),
        "reward_func_names": ["reward"],
        "reward_funcs": [None],
        "reward_clip_range": None,
        "normalize_advantages": False,
        "log_multimodal": False,
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        "_pending_extra_logs": defaultdict(list),
        "_pending_metrics": defaultdict(list),
    }
    for name in [name for name in held if name in args]:
        args[name] = held.pop(name)
    one.__dict__.update(plain, args=types.SimpleNamespace(**args))
    one.__dict__.update(held)
    return one


def scored(kind, t, *, group_size, **held):
    """`_generate_and_score_completions` of completions as in the case: lengths, tool mask, log-probs, rewards."""
    one = trainer(kind, num_generations=group_size, **held)
    lengths = t.response.sum(dim=1).long().tolist()
    completions = [[1] * n for n in lengths]
    tool_mask = [row[:n].tolist() for row, n in zip(t.mask.long(), lengths, strict=True)]
    sampled = [row[:n].tolist() for row, n in zip(t.lr, lengths, strict=True)]
    prompts = [[1]] * len(lengths)
    if kind is GRPOTrainer:
        one._generate = lambda prompts_: (
            prompts,
            completions,
            tool_mask,
            ["c"] * len(lengths),
            sampled if one.use_vllm else None,
            None,
            None,
            None,
        )
    else:
        one._generate = lambda prompts_: (prompts, completions, ["c"] * len(lengths))
    one._calculate_rewards = lambda *_: t.rewards.unsqueeze(1)
    width = max(lengths)
    one._get_per_token_logps_and_entropies = lambda *_, **__: (t.lo[:, :width], None, None)
    return one._generate_and_score_completions([{"prompt": "p"}] * len(lengths))


def advantages(job: Job):
    t = tensors(job)
    out = scored(GRPOTrainer, t, group_size=job.options["group_size"], scale_rewards=job.options.get("scale", "group"))
    return {"advantages": out["advantages"].unsqueeze(1).expand_as(t.mask)}


def advantages_rloo(job: Job):
    t = tensors(job)
    out = scored(
        RLOOTrainer,
        t,
        group_size=job.options["group_size"],
        normalize_advantages=job.options.get("normalize", False),
    )
    return {"advantages": out["advantages"].unsqueeze(1).expand_as(t.mask)}


def importance_weights(job: Job):
    t = tensors(job)
    out = scored(
        GRPOTrainer,
        t,
        group_size=1,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=job.options["mode"],
        vllm_importance_sampling_clip_min=job.options.get("low"),
        vllm_importance_sampling_clip_max=job.options["high"],
    )["importance_sampling_ratio"]
    weights = torch.zeros_like(t.mask)
    weights[:, : out.shape[1] if out.shape[1] > 1 else weights.shape[1]] = out
    return {"weights": weights}


def loss_of(one, t, new, advantages_BT, mask):
    """`_compute_loss`, which here is the plain sum of the token losses over `mask` (see `trainer`)."""
    one._get_per_token_logps_and_entropies = lambda *_, **__: (new, torch.zeros_like(new), None)
    ids = torch.ones(mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantages_BT,
        "old_per_token_logps": t.lo,
        "ref_per_token_logps": t.lf,
        "sampling_per_token_logps": t.lr,
        "num_items_in_batch": torch.tensor(1.0),
    }
    return one._compute_loss(None, inputs)


def settings(options):
    held = {"epsilon_low": options.get("eps", 0.2), "epsilon_high": options.get("eps_high", options.get("eps", 0.2))}
    names = ("delta", "importance_sampling_level", "off_policy_mask_threshold", "use_bias_correction_kl", "beta")
    return held | {name: options[name] for name in names if name in options}


def policy_loss(loss_type):
    """Loss of each token: a policy loss is linear in the advantage of its token, so all others get 0."""

    def run(job: Job):
        t = tensors(job)
        # `dapo` and `cispo` divide by num_items_in_batch, 1 here; `sapo` by each sequence's tokens, then by sequences
        one = trainer(GRPOTrainer, loss_type=loss_type, **settings(job.options))
        scale = torch.ones_like(t.mask)
        if loss_type == "sapo":
            scale = (t.mask.sum(dim=1, keepdim=True).clamp(min=1) * len(t.mask)).expand_as(t.mask)
        per_token = torch.zeros_like(t.mask)
        for b, k in t.mask.nonzero().tolist():
            alone = torch.zeros_like(t.credit_T)
            alone[b, k] = t.credit_T[b, k]
            per_token[b, k] = loss_of(one, t, t.lp, alone, t.mask) * scale[b, k]
        new = t.lp.clone().requires_grad_()
        # advantages as TRL has them, one a sequence, times what its mean divides by
        total = loss_of(one, t, new, t.credit_T * scale, t.mask)
        (grad,) = torch.autograd.grad(total, new)
        out = {"loss": per_token, "grad": grad}
        clipped = one._metrics["train"].get("clip_ratio/region_mean")
        if clipped:
            out["clipfrac"] = torch.tensor(clipped[-1])
        return out

    return run


def rloo_loss(job: Job):
    """RLOOTrainer's own loss: gradient of the sum over sequences."""
    t = tensors(job)
    one = trainer(RLOOTrainer)
    new = t.lp.clone().requires_grad_()
    one._get_per_token_logps_and_entropies = lambda *_, **__: (new, torch.zeros_like(new), None)
    ids = torch.ones(t.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": t.mask,
        "advantages": t.credit,
        "old_logps": ((t.lp if job.options.get("on_policy") else t.lo) * t.mask).sum(dim=1),
    }
    loss = one._compute_loss(None, inputs) * len(t.mask)
    (grad,) = torch.autograd.grad(loss, new)
    return {"grad": grad}


def kl(job: Job):
    """The KL term alone: advantages 0, coefficient 1, one token in the mask at a time."""
    t = tensors(job)
    one = trainer(GRPOTrainer, **(settings(job.options) | {"beta": 1.0}))
    zero = torch.zeros_like(t.credit_T)
    per_token = torch.zeros_like(t.mask)
    for b, k in t.mask.nonzero().tolist():
        alone = torch.zeros_like(t.mask)
        alone[b, k] = 1
        per_token[b, k] = loss_of(one, t, t.lp, zero, alone)
    new = t.lp.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(one, t, new, zero, t.mask), new)
    return {"kl": per_token, "grad": grad}


def off_policy_mask(job: Job):
    t = tensors(job)
    kept = GRPOTrainer.get_off_policy_mask(t.credit.unsqueeze(1), t.lp, t.lr, t.mask, job.options["delta"])
    return {"kept": kept.expand_as(t.mask)}


def reduction(job: Job):
    """Losses of the case as -(ratio 1) * advantage; `micro_batch_size`: as accumulated over micro-batches."""
    t = tensors(job)
    size = job.options.get("micro_batch_size") or len(t.mask)
    steps = math.ceil(len(t.mask) / size)
    one = trainer(
        GRPOTrainer,
        loss_type=job.options["mode"],
        max_completion_length=job.options.get("max_completion_length", 1),
        current_gradient_accumulation_steps=steps,
        steps_per_generation=steps,
    )
    total = torch.zeros(())
    for at in range(0, len(t.mask), size):
        part = types.SimpleNamespace(**{n: getattr(t, n)[at : at + size] for n in ("lp", "lo", "lr", "lf", "mask")})
        new = part.lp
        part.lo = new
        one._get_per_token_logps_and_entropies = lambda *_, new=new, **__: (new, torch.zeros_like(new), None)
        ids = torch.ones(part.mask.shape, dtype=torch.long)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": part.mask,
            "advantages": -t.token_losses[at : at + size],
            "num_items_in_batch": t.mask.sum(),
        }
        total = total + one._compute_loss(None, inputs)
    return {"scalar": total}


JOBS = {
    "advantages": advantages,
    "advantages_rloo": advantages_rloo,
    "importance_weights": importance_weights,
    **{f"loss/{name}": policy_loss(name) for name in ("dapo", "cispo", "sapo")},
    "loss/rloo": rloo_loss,
    "kl": kl,
    "off_policy_mask": off_policy_mask,
    "reduction": reduction,
    "entropy": of_logits("entropy", lambda logits, _: entropy_from_logits(logits)),
    "logprobs": of_logits("logprobs", selective_log_softmax),
}

serve(JOBS)
