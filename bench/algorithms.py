"""Does every algorithm learn? The shopkeeper, once for each, from the same start, data and seeds.

    python bench/algorithms.py [--out runs/algorithms] [--seeds 1234 ...] [NAME ...]

Needs `runs/shopkeeper/start` (examples/shopkeeper/README.md). Every run has 30 rollout steps of 128 sessions with 4
optimizer steps each, so that three of four steps meet a policy that is no longer the one that sampled: ratios, clip
ranges and the differences between the algorithms come into play. Prints the held-out reward (74 questions, sampled) of
every 5th step as a table; the runs stay under OUT for `scripts/plot_rewards.py --named`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

COMMON = ["--num-rollout", "30", "--num-steps-per-rollout", "4", "--eval-interval", "5", "--lr", "2e-4"]


def held_out(run_dir: Path) -> dict[int, float]:
    """Held-out reward by rollout step."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    documents = [json.loads(line) for line in lines]
    return {one["step"]: one["eval/held_out/reward"] for one in documents if "eval/held_out/reward" in one}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--seeds", nargs="+", default=["1234"])
    args = parser.parse_args()
    from silva.train.algorithms import ALGORITHMS

    silva = str(Path(sys.executable).with_name("silva"))
    for name in args.names or list(ALGORITHMS):
        for seed in args.seeds:
            run_dir = args.out / f"{name}-{seed}" if len(args.seeds) > 1 else args.out / name
            if not (run_dir / "metrics.jsonl").exists():
                command = [silva, "train", "--config", "examples/shopkeeper/run.toml", "--run-dir", str(run_dir)]
                command += ["--advantage-estimator", name, "--seed", seed, "--rollout-seed", seed, "--save-interval"]
                command += ["30", *COMMON]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(f"{' '.join(command)}\n{done.stderr}")
            points = held_out(run_dir)
            print(
                f"| {name} | {seed} | " + " | ".join(f"{points[step]:.3f}" for step in sorted(points)) + " |",
                flush=True,
            )


if __name__ == "__main__":
    main()
