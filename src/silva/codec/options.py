"""Options of the turn codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from silva.types import opt

CodecMode = Literal["proven", "rerender"]


@dataclass(frozen=True, kw_only=True)
class CodecOptions:
    """How conversations become tokens."""

    apply_chat_template_kwargs: dict[str, object] = opt("model", {})
    """Chat template arguments that every request starts from."""
    agentic_codec: CodecMode = opt("matching", "proven")
    """How new messages become tokens: proven deltas, or a full new render (a new root) per turn."""
