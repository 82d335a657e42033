"""The batches that both sides of bench/oracle.py compute on, as arrays of [B, T] and [B].

    lp lo lr lf         log-probs: in training, before the update, of the engine that sampled, of the reference model
    mask response       1 on trainable tokens; 1 on all of the response, tool results included (the rest is padding)
    values new_values returns   of a critic: before the update, in training, what it learns
    rewards group [B]   outcome rewards, and the group of each sequence
    outcome             the reward at the last trainable token of each sequence, else 0
    credit [B] credit_T         some advantage of each sequence, and the same at each token
    advantages token_losses     some numbers that differ from token to token

What stands at tokens of mask 0 is made up like the rest, so a peer that lets it in is found out.
"""

from __future__ import annotations

import numpy as np

Case = dict[str, np.ndarray]


def batch(
    *,
    seed: int,
    rewards: list[float],
    group: list[int],
    lengths: list[int],
    tools: list[tuple[int, int]],
    spread: float = 0.2,
) -> Case:
    """Sequence b has `lengths[b]` tokens, of which those from `tools[b][0]` up to `tools[b][1]` are a tool's."""
    rng = np.random.default_rng(seed)
    num, width = len(rewards), max(lengths)
    shape = (num, width)
    lp = -rng.gamma(1.5, 0.8, shape) - 0.01
    response = np.zeros(shape)
    mask = np.zeros(shape)
    outcome = np.zeros(shape)
    for b, (length, (start, end)) in enumerate(zip(lengths, tools, strict=True)):
        response[b, :length] = 1
        mask[b, :length] = 1
        mask[b, start:end] = 0
        outcome[b, np.flatnonzero(mask[b])[-1] if mask[b].any() else 0] = rewards[b]
    lo = lp - rng.normal(0, spread, shape)
    lr = lo - rng.normal(0, spread, shape)
    values = rng.normal(0, 1, shape)
    credit = rng.normal(0, 1, num)
    return {
        "lp": lp,
        "lo": lo,
        "lr": lr,
        "lf": lp - rng.normal(0, spread, shape),
        "mask": mask,
        "response": response,
        "values": values,
        "new_values": values + rng.normal(0, 0.3, shape),
        "returns": values + rng.normal(0, 1, shape),
        "rewards": np.array(rewards, dtype=np.float64),
        "group": np.array(group),
        "outcome": outcome,
        "credit": credit,
        "credit_T": np.repeat(credit[:, None], width, axis=1),
        "advantages": rng.normal(0.3, 2, shape),
        "token_losses": rng.normal(0, 1, shape),
    }


def small(rewards: list[float], group: list[int] | None = None, *, tool: bool = False) -> Case:
    """Sequences of 6 tokens, no padding; with `tool` the third and fourth are a tool's."""
    num = len(rewards)
    return batch(
        seed=7,
        rewards=rewards,
        group=group or [0] * num,
        lengths=[6] * num,
        tools=[(2, 4) if tool else (0, 0)] * num,
    )


def cases() -> dict[str, Case]:
    """By name."""
    rng = np.random.default_rng(11)
    lengths = [20, 14, 9, 24, 17, 5, 22, 11, 13, 24, 8, 19]
    gaps = [(6, 11), (3, 5), (0, 0), (10, 19), (4, 9), (1, 3), (8, 10), (5, 6), (0, 0), (2, 14), (3, 6), (7, 15)]
    rewards = rng.normal(0.4, 1, 12).round(3).tolist()
    even = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    no_gaps = {"lengths": [16] * 12, "tools": [(0, 0)] * 12}
    ragged = {"lengths": lengths, "tools": gaps}
    held = {
        "even": batch(seed=1, rewards=rewards, group=even, **ragged),
        "binary": batch(seed=1, rewards=[1, 0, 0, 0, 1, 1, 0, 1, 0, 0, 1, 0], group=even, **ragged),
        "no tools": batch(seed=2, rewards=rewards, group=even, **no_gaps),
        "uneven": batch(seed=3, rewards=rewards, group=[4, 7, 4, 2, 7, 4, 2, 4, 7, 2, 4, 7], **ragged),
        "wide": batch(seed=4, rewards=rewards, group=even, spread=4.0, **ragged),
        "tool": small([1.0], tool=True),
        "alone": small([0.7, 1.0, 0.0], [0, 1, 1]),
        "single": small([0.7]),
        "equal": small([0.97] * 8),
        "below 0": small([-1.0, -3.0]),
        "mean 0": small([1.0, -1.0]),
        "padded": batch(seed=5, rewards=[1.0, 0.0], group=[0, 0], lengths=[6, 3], tools=[(0, 0)] * 2),
        "two lengths": batch(seed=6, rewards=[1.0, 0.0], group=[0, 0], lengths=[9, 1], tools=[(0, 0)] * 2),
        "no token": batch(seed=8, rewards=[1.0, 0.0], group=[0, 0], lengths=[6, 6], tools=[(0, 0), (0, 6)]),
        "one token": batch(seed=9, rewards=[1.0], group=[0], lengths=[1], tools=[(0, 0)]),
    }
    # some 20 % of the tokens further apart than exp may be given, either way
    far = batch(seed=5, rewards=rewards, group=even, **ragged)
    at = rng.random(far["lp"].shape) < 0.2
    for old, new in (("lo", "lp"), ("lr", "lo"), ("lf", "lp")):
        push = rng.choice([-1, 1], far["lp"].shape) * rng.uniform(20.5, 24, far["lp"].shape)
        far[old] = np.where(at, far[new] - push, far[old])
    held["far"] = far
    # whole sequences drifted: the mean of the log-ratio is 12 in one of bad credit, -12 in one of good
    drift = small([1.0, 0.0], [0, 0])
    drift["lo"] = drift["lp"] - np.array([[-12.0], [12.0]])
    drift["credit"] = np.array([1.0, -1.0])
    drift["credit_T"] = np.repeat(drift["credit"][:, None], 6, axis=1)
    held["drifted"] = drift
    # sequence 0 was sampled by a policy 0.5 above the one in training per token, sequence 1 by one 0.5 below
    off = small([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1])
    off["lr"] = off["lp"] + np.array([[0.9], [0.9], [-0.9], [-0.9]])
    off["lo"] = off["lp"].copy()
    off["credit"] = np.array([1.0, -1.0, 1.0, -1.0])
    off["credit_T"] = np.repeat(off["credit"][:, None], 6, axis=1)
    held["off"] = off
    constant = small([0.7, 0.7])
    constant["advantages"] = np.full((2, 6), 0.7)
    held["constant"] = constant
    hole = small([1.0, 0.0], tool=True)
    hole["token_losses"][:, 2] = np.nan
    hole["lp"][:, 2] = np.nan
    held["hole"] = hole
    logits = rng.normal(0, 3, (17, 29))
    held["logits"] = {"logits": logits, "targets": rng.integers(0, 29, 17)}
    ruled_out = logits.copy()
    ruled_out[:, 20:] = -np.inf
    held["ruled out"] = {"logits": ruled_out, "targets": rng.integers(0, 20, 17)}
    return held
