"""Silva's side of bench/oracle.py: its own functions on a case, and its formulas with a peer's reason put in.

All take a case (see cases.py) and give arrays by name, [B, T] or scalars; what stands at tokens of mask 0 is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from peers.cases import Case
from silva.train.advantages import AdvantageConfig, SequenceNumbers, gae, returns, whiten
from silva.train.algorithms import ALGORITHMS
from silva.train.corrections import opsm_dropped, tis_ratio, tis_weights
from silva.train.losses.clip import PolicyLoss
from silva.train.losses.kl import kl_estimate
from silva.train.losses.tokens import clamp_log_ratio, token_entropy, token_logprobs
from silva.train.losses.value import value_loss
from silva.train.options import ClipOptions, KlType, Reduction, TisOptions
from silva.train.packing import pack_batch
from silva.types.generation import VersionSpan
from silva.types.rollout import ResponseSpan, TrainingSample

Arrays = dict[str, np.ndarray]


def of_tokens(case: Case, name: str) -> torch.Tensor:
    """What the case holds for its trainable tokens: [N], float64."""
    return torch.from_numpy(case[name][case["mask"] > 0])


def sequences(case: Case) -> torch.Tensor:
    """The sequence of each trainable token: [N]."""
    return torch.from_numpy(np.nonzero(case["mask"])[0])


def spread(case: Case, values_N: torch.Tensor | np.ndarray) -> np.ndarray:
    """[N] put back into [B, T]."""
    out = np.zeros(case["mask"].shape)
    out[case["mask"] > 0] = np.asarray(values_N.detach() if isinstance(values_N, torch.Tensor) else values_N)
    return out


def credit(case: Case, function: Callable[[list[float]], list[float]]) -> np.ndarray:
    """The credit of each sequence by a function of a group's rewards: [B]."""
    out = np.zeros(len(case["group"]))
    for group in np.unique(case["group"]):
        members = np.flatnonzero(case["group"] == group)
        out[members] = function(case["rewards"][members].tolist())
    return out


def credits(case: Case, function: str | Callable[[list[float]], list[float]]) -> Arrays:
    """`function`: one of a group's rewards, or the name of an algorithm that has one."""
    of_group = ALGORITHMS[function].credit if isinstance(function, str) else function
    return {"advantages": credit(case, of_group)[:, None] * case["mask"]}


def whitened_credits(case: Case, function: str) -> Arrays:
    parts = np.split(*_cut(case, credit(case, ALGORITHMS[function].credit)[:, None] + 0 * case["mask"]))
    return {"advantages": spread(case, np.concatenate(whiten(parts)))}


def _cut(case: Case, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[N] and where each sequence but the first begins."""
    return values[case["mask"] > 0], np.cumsum(case["mask"].sum(axis=1).astype(int))[:-1]


def token_advantages(case: Case, kind: str, *, gamma: float, lambd: float = 1.0, kl_coef: float = 0.0) -> Arrays:
    """Returns or GAE of every sequence, and whitened over the batch."""
    config = AdvantageConfig(kind=kind, gamma=gamma, lambd=lambd, kl_coef=kl_coef)
    parts, targets = [], []
    for b in range(len(case["mask"])):
        at = case["mask"][b] > 0
        numbers = SequenceNumbers(
            credit_N=np.full(int(at.sum()), case["rewards"][b]),
            kl_N=(case["lo"] - case["lf"])[b][at],
            values_N=case["values"][b][at],
        )
        if kind == "gae":
            advantages_N, returns_N = gae(numbers, config)
            targets.append(returns_N)
        else:
            advantages_N = returns(numbers, config)
        parts.append(advantages_N)
    out = {"whitened": spread(case, np.concatenate(whiten(parts)))}
    if kind == "gae":
        out["returns"] = spread(case, np.concatenate(targets))
    return out | {"advantages" if kind == "gae" else "returns": spread(case, np.concatenate(parts))}


def whitened(case: Case) -> Arrays:
    return {"whitened": spread(case, np.concatenate(whiten(np.split(*_cut(case, case["advantages"])))))}


def policy_loss(case: Case, loss: str | PolicyLoss, **clip: float) -> Arrays:
    """`loss`: a function, or the name of an algorithm that has one."""
    function = ALGORITHMS[loss].policy_loss() if isinstance(loss, str) else loss
    new_N = of_tokens(case, "lp").requires_grad_()
    names = {"eps": "eps_clip", "eps_high": "eps_clip_high", "dual_clip": "eps_clip_c"}
    config = ClipOptions(**{names[name]: value for name, value in clip.items()})
    loss_N, clipped_N = function(new_N, of_tokens(case, "lo"), of_tokens(case, "credit_T"), sequences(case), config)
    (grad_N,) = torch.autograd.grad(loss_N.sum(), new_N)
    return {
        "loss": spread(case, loss_N),
        "grad": spread(case, grad_N),
        "clipfrac": np.array(clipped_N.double().mean()),
        "ppo_kl": np.array((of_tokens(case, "lo") - new_N.detach()).mean()),
    }


def kl(case: Case, kind: KlType, *, unbiased: bool = False) -> Arrays:
    new_N = of_tokens(case, "lp").requires_grad_()
    ratio_N = clamp_log_ratio(new_N - of_tokens(case, "lo")).exp() if unbiased else None
    kl_N = kl_estimate(new_N, of_tokens(case, "lf"), kind, ratio_N)
    (grad_N,) = torch.autograd.grad(kl_N.sum(), new_N)
    return {"kl": spread(case, kl_N), "grad": spread(case, grad_N)}


def critic_loss(case: Case, *, clip: float) -> Arrays:
    new_N = of_tokens(case, "new_values").requires_grad_()
    loss_N, _ = value_loss(new_N, of_tokens(case, "values"), of_tokens(case, "returns"), clip)
    (grad_N,) = torch.autograd.grad(loss_N.sum(), new_N)
    return {"loss": spread(case, loss_N), "grad": spread(case, grad_N)}


def weights(case: Case, **band: Any) -> Arrays:
    names = {"low": "tis_clip_low", "high": "tis_clip", "level": "tis_level", "mode": "tis_mode"}
    config = TisOptions(**{names[name]: value for name, value in band.items()})
    ratio_N = tis_ratio(of_tokens(case, "lo"), of_tokens(case, "lr"), sequences(case), config.tis_level)
    weights_N = tis_weights(ratio_N, config)
    return {"weights": spread(case, weights_N), "kept": spread(case, (weights_N != 0).double())}


def opsm(case: Case, *, delta: float) -> Arrays:
    dropped_N = opsm_dropped(
        of_tokens(case, "lp"), of_tokens(case, "lr"), of_tokens(case, "credit_T"), sequences(case), delta
    )
    return {"kept": spread(case, (~dropped_N).double())}


def entropy(case: Case) -> Arrays:
    logits_NV = torch.from_numpy(case["logits"]).requires_grad_()
    value_N = token_entropy(logits_NV, 1.0)
    (grad_NV,) = torch.autograd.grad(value_N.sum(), logits_NV)
    return {"entropy": value_N.detach().numpy(), "grad": grad_NV.numpy()}


def logprobs(case: Case) -> Arrays:
    logits_NV = torch.from_numpy(case["logits"]).requires_grad_()
    value_N = token_logprobs(logits_NV, torch.from_numpy(case["targets"]), 1.0)
    (grad_NV,) = torch.autograd.grad(value_N.sum(), logits_NV)
    return {"logprobs": value_N.detach().numpy(), "grad": grad_NV.numpy()}


def reduced(
    case: Case, reduction: Reduction, *, max_response_len: int = 1, sessions: list[str] | None = None
) -> Arrays:
    """The token losses of the case with the weights that packing gives; each sequence is a session of its own."""
    num, width = case["mask"].shape
    samples = [
        TrainingSample(
            session_id=sessions[b] if sessions else str(b),
            group_id="g",
            name=str(b),
            node_id=b,
            prompt_len=1,
            token_ids=[1] * (width + 1),
            loss_mask=[0, *case["mask"][b].astype(int).tolist()],
            logprobs=[0.0] * (width + 1),
            kept_mass=[1.0] * (width + 1),
            version_spans=(VersionSpan(start=0, length=width + 1, version=0),),
            responses=(ResponseSpan(node_id=b, start=1, length=width),),
            reward=0.0,
            credit=0.0,
        )
        for b in range(num)
    ]
    losses = [np.append(0.0, row) for row in case["token_losses"]]
    packed = pack_batch(samples, reduction=reduction, max_response_len=max_response_len)
    return {"scalar": np.array(sum(float(row.weights_N @ row.gather(losses)) for row in packed.rows))}
