"""Options of the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from silva.types import opt

EngineName = Literal["torch", "scripted", "sglang"]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What samples tokens."""

    engine: EngineName = opt("engines", "torch", "What samples tokens.", later_choices=("vllm",))
    engine_url: list[str] = opt(
        "engines",
        [],
        "Servers of --engine sglang; a session stays with one, and another takes over after a fault.",
        metavar="URL",
    )
    engine_script: str | None = opt(
        "engines", None, "JSON Lines file of answers for --engine scripted.", metavar="FILE"
    )
    engine_log: str | None = opt(
        "engines", None, "JSON Lines file that records each call of --engine scripted.", metavar="FILE"
    )
    engine_concurrency: int = opt("engines", 32, "Requests that the torch engine decodes at once.", low=1)
    engine_timeout_s: float = opt(
        "engines",
        300.0,
        "Seconds without an answer after which an engine call counts as failed.",
        metavar="SECONDS",
        above=0,
    )
    weight_sync: Literal["memory"] = opt(
        "engines", "memory", "How new weights reach the engine.", later_choices=("disk", "nccl", "gloo")
    )
