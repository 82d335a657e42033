"""Options of the prompt data."""

from __future__ import annotations

from dataclasses import dataclass

from silva.types import opt


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which rows are read, from which keys, in which order."""

    prompt_data: str | None = opt("data", None, metavar="FILE")
    """JSON Lines or Parquet file of prompts."""
    input_key: str = opt("data", "input", metavar="KEY")
    """Row key of the text or message list."""
    metadata_key: str = opt("data", "metadata", metavar="KEY")
    """Row key of the metadata object."""
    label_key: str | None = opt("data", None, metavar="KEY")
    """Row key of what only the judges of a session see, any JSON value."""
    skip_bad_rows: bool = opt("data", False)
    """Drop and count broken rows instead of refusing the file."""
    rollout_shuffle: bool = opt("rollout", False)
    """Shuffle the prompts of each epoch."""
    rollout_seed: int = opt("rollout", 42, low=0)
    """Seed of the data order."""
