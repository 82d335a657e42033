"""Dumps of rollout steps, written by hand: one line a sample, as `write_rollout_dump` writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from silva.store.dump_line import DumpLine
from silva.types.rollout import TrainingSample

_FIELDS = (
    *("node_id", "prompt_len", "token_ids", "loss_mask", "logprobs", "kept_mass", "reward", "helpers", "truncated"),
    *("session_id", "name", "metadata", "images"),
)


def write_dump(path: Path, groups: Sequence[Sequence[TrainingSample]]) -> None:
    """One step: groups of sessions of one sample each."""
    lines: list[bytes] = []
    for number, samples in enumerate(groups):
        for slot, sample in enumerate(samples):
            line = DumpLine(
                **{"rollout_id": int(path.stem), "mode": "train", "dataset": "train", "epoch": 0, "row": number},
                **{"prompt_id": f"train:0:{number}", "prompt_state": "trained", "prompt_reason": None},
                **{"position": number, "attempt": 0, "group_id": f"g{number}", "group_size": len(samples)},
                **{"slot": slot, "try_index": 0, "status": "exported", "reason": None, "error": None},
                **{"session_reward": sample.reward, "session_metadata": {}, "started_s": 0.0, "ended_s": 1.0},
                **{"input": {"metadata": {}}, **{name: getattr(sample, name) for name in _FIELDS}},
                weight_spans=[(span.start, span.length, span.version) for span in sample.version_spans],
                responses=[(span.node_id, span.start, span.length) for span in sample.responses],
            )
            lines.append(line.encode())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(lines))
