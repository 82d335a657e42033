"""Options of the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from silva.types import opt

EngineName = Literal["torch", "scripted", "sglang"]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What samples tokens."""

    engine: EngineName = opt("engines", "torch", later_choices=("vllm",))
    """What samples tokens."""
    engine_url: list[str] = opt("engines", [], metavar="URL")
    """Servers of --engine sglang; a session stays with one, and another takes over after a fault."""
    engine_script: str | None = opt("engines", None, metavar="FILE")
    """JSON Lines file of answers for --engine scripted."""
    engine_log: str | None = opt("engines", None, metavar="FILE")
    """JSON Lines file that records each call of --engine scripted."""
    engine_concurrency: int = opt("engines", 32, low=1)
    """Requests that the torch engine decodes at once."""
    engine_timeout_s: float = opt("engines", 300.0, metavar="SECONDS", above=0)
    """Seconds without an answer after which an engine call counts as failed."""
    weight_sync: Literal["memory"] = opt("engines", "memory", later_choices=("disk", "nccl", "gloo"))
    """How new weights reach the engine."""
