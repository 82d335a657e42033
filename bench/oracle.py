"""Credit, advantages, losses and corrections against the same parts of verl, SkyRL and TRL.

    PYTHONPATH=src python bench/oracle.py --peer PYTHON [--verl PYTHON] [--skyrl PYTHON] [--trl PYTHON] [--markdown]

`PYTHON` is one that can import the peers (docs/oracle.md says how to make it), for all three or each its own; a peer
without one is left out. Inputs go to a subprocess of it as arrays, and its results come back as arrays.

A row is a definition, a cell what a peer has in its place:

1e-16                    the same: largest difference over all cases, tokens and parts (loss, gradient, ...)
0.7 -> 1e-16 [reason]    another one: the difference, and what is left when the reason is put into Silva's formula
refuses [reason]         the peer raises
-                        nothing of the kind

Difference: absolute up to 1, relative to Silva's number above. Exit code 1 if a "same" or a "what is left" exceeds
1e-6, or one that should differ does not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from peers.cases import Case, cases
from peers.ours import Arrays
from peers.reasons import WHY
from peers.row import Cell, Other, Refuses, Row, Same
from peers.rows import ROWS

LIMIT = 1e-6
PEERS = ("verl", "skyrl", "trl")
HERE = Path(__file__).resolve().parent / "peers"


@dataclass
class Result:
    """What a cell came to. `at`: (Silva's number, the peer's) where they are furthest apart."""

    text: str
    ok: bool
    reason: str = ""
    at: tuple[float, float] = (0.0, 0.0)
    left: float | None = None


def jobs_of(row: Row, cell: Cell) -> list[tuple[str, str, dict[str, object]]]:
    if isinstance(cell, str):
        return []
    return [(cell.job, case, cell.options) for case in ((cell.case,) if cell.case else row.cases)]


def ask(python: str, peer: str, jobs: list[tuple[str, str, dict[str, object]]], held: dict[str, Case]) -> list[Arrays]:
    """The results of all jobs; {"error": message} for one that the peer refused."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("jobs.json", "cases.npz", "out.npz")]
        paths[0].write_text(json.dumps(jobs))
        np.savez(paths[1], **{f"{case}/{name}": array for case, part in held.items() for name, array in part.items()})
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [python, str(HERE / f"{peer}_peer.py"), *map(str, paths)],
            env=environment | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{peer} under {python} failed:\n{done.stderr[-3000:]}")
        results: list[Arrays] = [{} for _ in jobs]
        with np.load(paths[2]) as out:
            for path in out.files:
                at, part = path.split("/")
                results[int(at)][part] = out[path]
    return results


def difference(case: Case, ours: Arrays, theirs: Arrays, parts: tuple[str, ...]) -> tuple[float, tuple[float, float]]:
    """The largest difference over the parts, at trainable tokens, and both numbers there."""
    named = parts or tuple(name for name in theirs if name in ours)
    assert named, f"nothing to compare in {list(ours)} and {list(theirs)}"
    worst, at = -1.0, (0.0, 0.0)
    for name in named:
        a, b = np.asarray(ours[name], dtype=np.float64), theirs[name]
        assert a.shape == b.shape, f"{name}: {a.shape} and {b.shape}"
        if "mask" in case and a.shape == case["mask"].shape:
            a, b = a[case["mask"] > 0], b[case["mask"] > 0]
        apart = np.abs(a - b) / np.maximum(1, np.abs(a))
        apart = np.where(np.isnan(apart), np.inf, apart)
        place = np.unravel_index(np.argmax(apart), apart.shape)
        if apart[place] > worst:
            worst, at = float(apart[place]), (float(a[place]), float(b[place]))
    return worst, at


def judge(row: Row, cell: Cell, results: list[Arrays], held: dict[str, Case]) -> Result:
    if isinstance(cell, str):
        return Result(cell, True)
    used = [held[case] for _, case, _ in jobs_of(row, cell)]
    refused = [str(result["error"]) for result in results if "error" in result]
    if isinstance(cell, Refuses):
        return Result(f"refuses [{cell.reason}]", len(refused) == len(results), cell.reason)
    if refused:
        return Result(f"REFUSED: {refused[0]}", False)
    apart = [difference(case, row.ours(case), theirs, cell.parts) for case, theirs in zip(used, results, strict=True)]
    worst, at = max(apart, key=lambda one: one[0])
    if isinstance(cell, Same):
        return Result(short(worst), worst <= LIMIT, at=at)
    if cell.put_in is None:
        return Result(f"{number(worst, 3)} [{cell.reason}]", worst > LIMIT, cell.reason, at)
    left = max(
        difference(case, cell.put_in(case), theirs, cell.parts)[0] for case, theirs in zip(used, results, strict=True)
    )
    text = f"{number(worst, 3)} -> {short(left)} [{cell.reason}]"
    return Result(text, worst > LIMIT and left <= LIMIT, cell.reason, at, left)


def number(value: float, digits: int = 6) -> str:
    return "NaN" if np.isinf(value) or np.isnan(value) else f"{value:.{digits}g}"


def short(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def table(head: list[str], lines: list[list[str]], *, markdown: bool) -> str:
    if markdown:
        return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in [head, *lines]]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python that can import all peers")
    for peer in PEERS:
        parser.add_argument(f"--{peer}", help=f"a Python that can import {peer}")
    parser.add_argument("--markdown", action="store_true", help="tables as in docs/oracle.md")
    options = parser.parse_args()
    pythons = {peer: getattr(options, peer) or options.peer for peer in PEERS}
    chosen = [peer for peer in PEERS if pythons[peer]]
    if not chosen:
        parser.error("give --peer PYTHON, or one of --verl, --skyrl, --trl")

    held, lines = cases(), ROWS
    judged: dict[str, list[Result]] = {}
    for peer in chosen:
        jobs = [jobs_of(row, row.cells()[peer]) for row in lines]
        results = ask(pythons[peer], peer, [job for part in jobs for job in part], held)
        judged[peer] = []
        for row, part in zip(lines, jobs, strict=True):
            mine, results = results[: len(part)], results[len(part) :]
            judged[peer].append(judge(row, row.cells()[peer], mine, held))

    body = [[row.algorithm, row.what, *(judged[peer][i].text for peer in chosen)] for i, row in enumerate(lines)]
    print(table(["algorithm", "what", *chosen], body, markdown=options.markdown))
    print()
    print(table(["what", "peer", "Silva", "it", "reason"], examples(lines, judged), markdown=options.markdown))
    bad = [
        f"{row.algorithm}, {row.what}, {peer}: {judged[peer][i].text}"
        for peer in chosen
        for i, row in enumerate(lines)
        if not judged[peer][i].ok
    ]
    same = sum(isinstance(row.cells()[peer], Same) for peer in chosen for row in lines)
    other = sum(isinstance(row.cells()[peer], Other | Refuses) for peer in chosen for row in lines)
    print(f"\n{same} the same, {other} that differ, {len(bad)} not as they should be")
    if bad:
        sys.exit("\n".join(bad))


def examples(lines: list[Row], judged: dict[str, list[Result]]) -> list[list[str]]:
    """Both numbers where they are furthest apart, for each definition that differs; peers of one mind in one line."""
    out: dict[tuple[str, ...], list[str]] = {}
    for i, row in enumerate(lines):
        for peer, results in judged.items():
            result = results[i]
            if result.reason:
                ours, theirs = ("", "raises") if result.text.startswith("refuses") else map(number, result.at)
                key = (f"{row.algorithm}: {row.what}", ours, theirs, f"{result.reason}: {WHY[result.reason]}")
                out.setdefault(key, []).append(peer)
    return [[name, ", ".join(peers), ours, theirs, why] for (name, ours, theirs, why), peers in out.items()]


if __name__ == "__main__":
    main()
