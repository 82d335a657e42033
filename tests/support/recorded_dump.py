"""Dumps of rollout steps, written by hand: one line a sample, as `write_rollout_dump` writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from silva.types.rollout import TrainingSample


def write_dump(path: Path, groups: Sequence[Sequence[TrainingSample]]) -> None:
    """One step: groups of sessions of one sample each."""
    lines: list[dict[str, Any]] = []
    for number, samples in enumerate(groups):
        for slot, sample in enumerate(samples):
            lines.append(
                {
                    **{
                        "mode": "train",
                        "dataset": "train",
                        "epoch": 0,
                        "row": number,
                        "position": number,
                        "attempt": 0,
                    },
                    **{"prompt_id": f"train:0:{number}", "prompt_state": "trained", "prompt_reason": None},
                    **{"group_id": f"g{number}", "group_size": len(samples), "slot": slot, "try_index": 0},
                    **{"session_id": sample.session_id, "status": "exported", "reason": None, "error": None},
                    **{"input": {"metadata": {}}, "label": None, "messages": [], "name": sample.name},
                    **{name: getattr(sample, name) for name in _FIELDS},
                    "weight_spans": [[span.start, span.length, span.version] for span in sample.version_spans],
                    "responses": [[span.node_id, span.start, span.length] for span in sample.responses],
                }
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


_FIELDS = (
    *("node_id", "prompt_len", "token_ids", "loss_mask", "logprobs", "kept_mass", "reward", "helpers", "truncated"),
    *("metadata", "images"),
)
