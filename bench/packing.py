"""Plans of packed rows: how full the rows are, how long ranks wait for each other, how long planning takes.

    PYTHONPATH=src python bench/packing.py [--peer PYTHON] [--seeds 20]

4096 lengths are drawn from a log-normal distribution and cut at the budget of 65,536 tokens a row; 8 ranks. With
`--peer`, the path of a Python that can import `verl` 0.9.1, its planner gets the same lengths of the first seed:

    controller      get_seqlen_balanced_partitions(workloads, 8, equal_size=True): the samples of each rank
    on each rank    rearrange_micro_batches(its samples, 65536, min_num_micro_batch=N): its rows

with its own workload, 24576 * L + L**2, which is also the cost that both are judged by. N is the smallest number for
which the rows of all ranks fit, as its ranks find it by asking each other from count to count; only the call with that
number is timed. Its ranks work at the same time, so its time is that of the controller and of the slowest rank. CPU
milliseconds of one thread, median of 9 (ours) and 3 (peer).

fill: tokens over what the rows could hold. possible: the same with as few rows as the tokens need, as many on each
rank. lock-step: cost with a wait for the costliest rank after every row, over an even share of all cost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import numpy as np
from plan_measures import fill, lockstep_ratio

from silva.train.balance import Plan, plan

NUM_SAMPLES, BUDGET, NUM_RANKS = 4096, 65536, 8
DRAWS = {"usual": (8.0, 1.0), "short": (7.0, 0.7), "long tail": (8.5, 1.5)}
"""Mean and standard deviation of the logarithm of a length."""

PEER = """
import json, sys, time, statistics
import torch
from tensordict import TensorDict
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, rearrange_micro_batches

def batch(lengths):
    rows = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
    ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return TensorDict({"input_ids": ids}, batch_size=[len(rows)])

def timed(call):
    started = time.process_time()
    out = call()
    return out, (time.process_time() - started) * 1e3

def once(lengths, budget, num_ranks):
    def deal():
        return get_seqlen_balanced_partitions(calculate_workload(torch.tensor(lengths)).tolist(), num_ranks, True)
    shares, deal_ms = timed(deal)
    batches = [batch([lengths[i] for i in share]) for share in shares]
    count = 1
    while True:
        done = [timed(lambda: rearrange_micro_batches(b, budget, min_num_micro_batch=count)[1]) for b in batches]
        counts = [len(rows) for rows, _ in done]
        if min(counts) == max(counts) == count:
            break
        count = max(counts)
    ranks = [[[share[i] for i in row] for row in rows] for share, (rows, _) in zip(shares, done)]
    return ranks, deal_ms + max(ms for _, ms in done)

torch.set_num_threads(1)
for line in sys.stdin:
    runs = [once(*json.loads(line)) for _ in range(3)]
    print(json.dumps({"ranks": runs[0][0], "ms": statistics.median(ms for _, ms in runs)}), flush=True)
"""


def draw(mu: float, sigma: float, seed: int) -> list[int]:
    lengths = np.random.default_rng(seed).lognormal(mu, sigma, NUM_SAMPLES).astype(np.int64) + 1
    return np.minimum(lengths, BUDGET).tolist()


def possible_fill(lengths: list[int]) -> float:
    per_rank = -(-sum(lengths) // (BUDGET * NUM_RANKS))
    return sum(lengths) / (per_rank * NUM_RANKS * BUDGET)


def ours(lengths: list[int]) -> tuple[Plan, float]:
    spent: list[float] = []
    for _ in range(9):
        started = time.process_time()
        planned = plan(lengths, BUDGET, num_ranks=NUM_RANKS)
        spent.append((time.process_time() - started) * 1e3)
    return planned, statistics.median(spent)


def theirs(python: str, draws: list[list[int]]) -> list[tuple[Plan, float]]:
    lines = "\n".join(json.dumps([lengths, BUDGET, NUM_RANKS]) for lengths in draws)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python, "-W", "ignore", "-c", PEER],
        input=lines,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [
        (Plan(ranks=tuple(tuple(tuple(row) for row in rows) for rows in answer["ranks"]), too_long=()), answer["ms"])
        for answer in answers
    ]


def tell(name: str, planned: Plan, lengths: list[int], ms: float) -> None:
    rows = [row for rank in planned.ranks for row in rank]
    assert sorted(i for row in rows for i in row) == list(range(len(lengths))), "a plan must hold each sample once"
    assert max(sum(lengths[i] for i in row) for row in rows) <= BUDGET, "a row is above the budget"
    print(
        f"  {name:<12} rows a rank {planned.num_rows:>3}  fill {fill(planned, lengths, BUDGET):.3f}  "
        f"lock-step {lockstep_ratio(planned, lengths):.3f}  {ms:8.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", help="a Python that can import verl 0.9.1")
    parser.add_argument("--seeds", type=int, default=20)
    args = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}; {NUM_SAMPLES} samples, {BUDGET} tokens a row, {NUM_RANKS} ranks")
    first = {name: draw(mu, sigma, 0) for name, (mu, sigma) in DRAWS.items()}
    answers = theirs(args.peer, list(first.values())) if args.peer else []
    for at, (name, (mu, sigma)) in enumerate(DRAWS.items()):
        lengths = first[name]
        print(f"{name} (mu {mu}, sigma {sigma}): {sum(lengths)} tokens, possible fill {possible_fill(lengths):.3f}")
        planned, ms = ours(lengths)
        tell("silva", planned, lengths, ms)
        if answers:
            tell("verl 0.9.1", answers[at][0], lengths, answers[at][1])
        worst: list[tuple[float, float, float]] = []
        for seed in range(args.seeds):
            lengths = draw(mu, sigma, seed)
            planned = plan(lengths, BUDGET, num_ranks=NUM_RANKS)
            filled = fill(planned, lengths, BUDGET)
            worst.append((filled, possible_fill(lengths) - filled, lockstep_ratio(planned, lengths)))
        fills, gaps, ratios = zip(*worst, strict=True)
        print(
            f"  silva, {args.seeds} seeds: fill {min(fills):.3f} to {max(fills):.3f}, at most {max(gaps):.4f} below "
            f"what is possible; lock-step {min(ratios):.3f} to {max(ratios):.3f}"
        )
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
