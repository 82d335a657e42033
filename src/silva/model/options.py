"""Options of the model: which one, and in which number type it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from silva.types import opt

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The start model of a run."""

    hf_checkpoint: str | None = opt("model", None, metavar="FOLDER")
    """Local Hugging Face folder with the start model and its tokenizer."""
    dtype: Dtype | None = opt("model", None)
    """Number type of model and engine (default: float32 on CPU, bfloat16 on CUDA)."""
