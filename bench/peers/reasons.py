"""Why a peer's result is another one, in a line and as Silva's formula with that reason put in."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import numpy as np
import torch

from peers import ours
from peers.cases import Case
from peers.ours import Arrays
from silva.train.algorithms import ALGORITHMS
from silva.train.losses.clip import clipped_surrogate
from silva.train.losses.tokens import sequence_mean, sequence_sum
from silva.train.options import ClipOptions

WHY = {
    "std_epsilon": "divides by std + 1e-4, Silva by std + 1e-6",
    "group_of_one": "a session alone in its group keeps its reward as advantage (mean 0, std 1); Silva gives 0",
    "float32": "in float32 the mean of equal rewards is off in its last digit, and the division blows that up; "
    "Silva counts in float64 and gives exactly 0 without a spread",
    "whitens_sequences": "mean and std over sequences, divided by std + 1e-4; Silva whitens over trainable tokens",
    "mean_epsilon": "divides by mean + 1e-6, Silva by the mean",
    "mean_below_0": "divides by mean + 1e-6 whatever the mean: below 0 the order of the group turns round, at 0 its "
    "advantages are a million; Silva gives 0",
    "tool_tokens": "tool results are steps like any other: gamma counts them and whitening takes them in; Silva passes "
    "over them",
    "tool_values": "bootstraps on the values at tool results and padding; Silva takes the next trainable token's",
    "padding_values": "bootstraps on the value at the padding behind the last token, unless its critic puts 0 there; "
    "Silva takes 0",
    "equal_values": "the mean divides by N + 1e-8, and var 0 + 1e-8 blows the difference up; Silva gives exactly 0",
    "one_token": "raises ValueError where one token is trainable; Silva gives 0",
    "mean_with_padding": "mean over all positions, padding included, std without Bessel correction over the response",
    "always_dual": "dual clip is always on, with c = 3 by default; in Silva it is off unless asked for",
    "no_clamp": "the log-ratio goes through exp as it is; Silva, verl and SkyRL clamp it to +-20",
    "clamp_10": "the log of the sequence ratio is clamped to at most 10, in Silva to +-20",
    "upper_only": "the ratio is bounded above only (by eps_high itself, here 1.2); Silva bounds it on both sides",
    "sequence_ratio": "a clipped ratio of the whole sequence, exp(sum of the log-ratios); Silva has none",
    "no_kl_clamp": "k3 is not bounded; Silva, verl and SkyRL clamp it to +-10",
    "k2_gradient": "k3+ has the value of k3 and the gradient of k2; Silva's unbiased form multiplies by the ratio",
    "mask_only": "sequences outside the band are left out, those inside keep weight 1; in Silva they get their ratio",
    "k1_direction": "the band is laid on rollout / old, in Silva on old / rollout: [a, b] here is [1/b, 1/a] there",
    "no_sign": "drops sequences that drifted whatever the sign of their advantage; OPSM drops those below 0 only",
    "micro_batch_mean": "a mean of each micro-batch, then over micro-batches: tokens of short ones weigh more",
    "side_terms": "KL is a mean of sequence means, entropy a token mean of each micro-batch, whatever loss_reduction "
    "says; in Silva all terms have the weights of the policy loss",
    "empty_not_counted": "a sequence without a trainable token does not count; in Silva its session does",
    "no_sessions": "each context is a sequence of its own; in Silva the contexts of a session share one mean",
    "mask_multiplies": "masks by multiplying, and NaN * 0 is NaN; Silva leaves masked tokens out",
    "inf_times_0": "0 * -inf is NaN; Silva counts ids without probability as 0",
}


def grpo_epsilon(epsilon: float) -> Callable[[Case], Arrays]:
    def of(rewards: list[float]) -> list[float]:
        mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
        return [(reward - mean) / (std + epsilon) for reward in rewards]

    return lambda case: ours.credits(case, of)


def _alone(algorithm: str, value: Callable[[float], float]) -> Callable[[list[float]], list[float]]:
    return lambda rewards: [value(rewards[0])] if len(rewards) == 1 else ALGORITHMS[algorithm].credit(rewards)


def grpo_alone(case: Case) -> Arrays:
    return ours.credits(case, _alone("grpo", lambda reward: reward / (1 + 1e-6)))


def rloo_alone(case: Case) -> Arrays:
    return ours.credits(case, _alone("rloo", lambda reward: reward))


def maxrl_alone(case: Case) -> Arrays:
    return ours.credits(case, _maxrl)


def baseline_alone(case: Case) -> Arrays:
    credit = ours.credit(case, _alone("reinforce_plus_plus_baseline", lambda reward: reward))
    return {"advantages": ours.whitened(case | {"advantages": credit[:, None] + 0 * case["mask"]})["whitened"]}


def grpo_float32(case: Case, *, epsilon: float) -> Arrays:
    def of(rewards: list[float]) -> list[float]:
        scores = torch.tensor(rewards, dtype=torch.float32)
        return ((scores - scores.mean()) / (scores.std() + epsilon)).tolist()

    return ours.credits(case, of)


def rloo_normalised(case: Case) -> Arrays:
    credit = ours.credit(case, ALGORITHMS["rloo"].credit)
    return {"advantages": ((credit - credit.mean()) / (credit.std(ddof=1) + 1e-4))[:, None] * case["mask"]}


def _maxrl(rewards: list[float]) -> list[float]:
    if len(rewards) == 1:
        return list(rewards)
    mean = statistics.fmean(rewards)
    return [(reward - mean) / (mean + 1e-6) for reward in rewards]


def maxrl_epsilon(case: Case) -> Arrays:
    return ours.credits(case, _maxrl)


def _whiten_where(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    inside = values[mask > 0]
    return (values - inside.mean()) / np.sqrt(inside.var(ddof=1) + 1e-8)


def _rewards(case: Case, kl_coef: float) -> np.ndarray:
    return case["outcome"] - kl_coef * (case["lo"] - case["lf"]) * case["mask"]


def returns_over_response(case: Case, *, gamma: float, kl_coef: float) -> Arrays:
    out = np.zeros(case["mask"].shape)
    later = np.zeros(len(out))
    for t in reversed(range(out.shape[1])):
        later = _rewards(case, kl_coef)[:, t] + gamma * later
        out[:, t] = later
    return {"returns": out, "whitened": _whiten_where(out, case["response"])}


def gae_over_all(case: Case, *, gamma: float, lambd: float, kl_coef: float) -> Arrays:
    rewards, values = _rewards(case, kl_coef), case["values"]
    out = np.zeros(values.shape)
    later, after = np.zeros(len(out)), np.zeros(len(out))
    for t in reversed(range(out.shape[1])):
        later = rewards[:, t] + gamma * after - values[:, t] + gamma * lambd * later
        after = values[:, t]
        out[:, t] = later
    return {"advantages": out, "returns": out + values, "whitened": _whiten_where(out, case["response"])}


def whitened_equal(case: Case) -> Arrays:
    inside = case["advantages"][case["mask"] > 0]
    return {"whitened": (case["advantages"] - inside.sum() / (len(inside) + 1e-8)) / math.sqrt(1e-8)}


def batch_normalised(case: Case) -> Arrays:
    values = case["advantages"] * case["response"]
    spread = ((values - values.mean()) ** 2 * case["response"]).sum() / case["response"].sum()
    return {"whitened": (values - values.mean()) / math.sqrt(spread)}


def _loss(case: Case, of: Callable[..., torch.Tensor]) -> Arrays:
    def loss(new_N, old_N, advantages_N, sequence_N, clip):
        return of(new_N, old_N, advantages_N, sequence_N), torch.zeros_like(new_N, dtype=torch.bool)

    return ours.policy_loss(case, loss)


def ppo_no_clamp(case: Case) -> Arrays:
    return _loss(case, lambda new, old, adv, _: clipped_surrogate((new - old).exp(), adv, ClipOptions())[0])


def gspo_clamp_10(case: Case) -> Arrays:
    def of(new, old, adv, sequence):
        log = new - new.detach() + sequence_mean((new - old).detach(), sequence)
        return clipped_surrogate(log.clamp(max=10).exp(), adv, ClipOptions())[0]

    return _loss(case, of)


def cispo_upper(case: Case) -> Arrays:
    return _loss(case, lambda new, old, adv, _: -(new - old).exp().clamp(max=1.2).detach() * adv * new)


def rloo_sequence_ratio(case: Case) -> Arrays:
    def of(new, old, adv, sequence):
        # each sequence counts once: its share at each of its tokens
        ratio = sequence_sum(new - old, sequence).exp()
        share = sequence_sum(torch.ones_like(new), sequence)
        return clipped_surrogate(ratio, adv, ClipOptions())[0] / share

    return _loss(case, of)


def k3_no_clamp(case: Case) -> Arrays:
    new_N = ours.of_tokens(case, "lp").requires_grad_()
    difference_N = new_N - ours.of_tokens(case, "lf")
    kl_N = torch.exp(-difference_N) - 1 + difference_N
    (grad_N,) = torch.autograd.grad(kl_N.sum(), new_N)
    return {"kl": ours.spread(case, kl_N), "grad": ours.spread(case, grad_N)}


def k3_k2_gradient(case: Case) -> Arrays:
    return {"kl": ours.kl(case, "k3")["kl"], "grad": ours.kl(case, "k2")["grad"]}


def geometric_kept(case: Case, *, low: float, high: float) -> Arrays:
    return {"weights": ours.weights(case, level="geometric", mode="mask", low=low, high=high)["kept"]}


def drifted_dropped(case: Case, *, delta: float) -> Arrays:
    gap_N = sequence_mean(ours.of_tokens(case, "lr") - ours.of_tokens(case, "lp"), ours.sequences(case))
    return {"kept": ours.spread(case, (gap_N <= delta).double())}


def micro_batch_mean(case: Case) -> Arrays:
    """Of micro-batches with one sequence each."""
    return ours.reduced(case, "session_mean")


def only_trainable(case: Case) -> Arrays:
    some = case["mask"].any(axis=1)
    return ours.reduced({name: case[name][some] for name in ("mask", "token_losses")}, "session_mean")
