"""Draws the reward curves of one or more runs as an SVG picture.

Usage: python scripts/plot_rewards.py --out curve.svg [--eval NAME] [--named] RUN_DIR ...

With --named only the held-out curves are drawn, each with the name of its run folder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 320, 48, 24, 16, 40
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")


def read_points(run_dir: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of one metric."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    documents = [json.loads(line) for line in lines]
    return [(document["step"], document[name]) for document in documents if name in document]


def draw(runs: list[Path], eval_name: str, *, named: bool = False) -> str:
    """The picture: a thin line for the reward of each training step, dots and a thick line for held-out eval."""
    curves = [(read_points(run, "rollout/raw_reward"), read_points(run, f"eval/{eval_name}/reward")) for run in runs]
    last = max(step for train, held in curves for step, _ in [*train, *held])

    def at(step: int, value: float) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / max(last, 1)
        return f"{x:.1f},{TOP + (HEIGHT - TOP - BOTTOM) * (1 - value):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tenth in range(0, 11, 2):
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - tenth / 10)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tenth / 10:.1f}</text>')
    for step in range(0, last + 1, 10):
        x = at(step, 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">rollout step</text>')
    parts.append(
        f'<text x="{LEFT}" y="{TOP - 8}">mean reward: held-out (dots){"" if named else ", training (thin)"}</text>'
    )
    for i, ((train, held), colour) in enumerate(zip(curves, COLOURS * len(curves), strict=False)):
        if named:
            x, y = WIDTH - RIGHT - 200, HEIGHT - BOTTOM - 14 * (len(curves) - i)
            parts.append(f'<text x="{x}" y="{y}" fill="{colour}">{runs[i].name}</text>')
        for points, width in ((held, 2),) if named else ((train, 1), (held, 3)):
            line = " ".join(at(*point) for point in points)
            parts.append(
                f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}" opacity="0.8"/>'
            )
        for point in held:
            x, y = at(*point).split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--eval", default="held_out")
    parser.add_argument("--named", action="store_true")
    args = parser.parse_args()
    args.out.write_text(draw(args.runs, args.eval, named=args.named), encoding="utf-8")


if __name__ == "__main__":
    main()
