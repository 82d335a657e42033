"""Options of the loop of a run, above all rooms that have options of their own."""

from __future__ import annotations

from dataclasses import dataclass

from silva.types import opt


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How long a run is, what it keeps, and which half of it runs."""

    run_dir: str | None = opt("run", None, metavar="FOLDER")
    """Folder of this run's files (default: runs/<date-time>)."""
    num_rollout: int | None = opt("run", None, low=1)
    """Number of rollout steps in total."""
    num_epoch: int | None = opt("run", None, low=1)
    """Passes over the prompt data; the smaller of this and --num-rollout ends the run."""
    save_interval: int | None = opt("run", None, low=1)
    """Rollout steps between checkpoints, with one at the end (default: none); the last 2 are kept."""
    save_hf: str | None = opt("run", None, metavar="FOLDER")
    """Folder for the final weights in Hugging Face form (default: not written)."""
    log_passrate: bool = opt("reward", False)
    """Add pass@k to the metrics: the chance that one of k sessions of a prompt has reward 1."""
    save_debug_rollout_data: str | None = opt("records", None, metavar="FILE")
    """File for the samples of each step as JSON lines; {rollout_id} in the path becomes the step."""
    load_debug_rollout_data: str | None = opt("records", None, metavar="FILE")
    """Train on the samples in such files instead of running agents; needs {rollout_id} too."""
    debug_train_only: bool = opt("records", False)
    """Start no engine, gateway or agent: what --load-debug-rollout-data implies."""
    debug_rollout_only: bool = opt("records", False)
    """silva train: collect groups and credit as in training, but update nothing."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """What is evaluated, and when."""

    eval_interval: int | None = opt("eval", None, low=1)
    """Rollout steps between evals, with one before the first step and one at the end (default: none)."""
    eval_prompt_data: list[str] = opt("eval", [], metavar="NAME PATH")
    """Pairs of a name and a JSON Lines or Parquet file."""
