"""Options of the prompt data."""

from __future__ import annotations

from dataclasses import dataclass

from silva.types import opt


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which rows are read, from which keys, in which order."""

    prompt_data: str | None = opt("data", None, "JSON Lines or Parquet file of prompts.", metavar="FILE")
    input_key: str = opt("data", "input", "Row key of the text or message list.", metavar="KEY")
    metadata_key: str = opt("data", "metadata", "Row key of the metadata object.", metavar="KEY")
    label_key: str | None = opt(
        "data", None, "Row key of what only the judges of a session see, any JSON value.", metavar="KEY"
    )
    skip_bad_rows: bool = opt("data", False, "Drop and count broken rows instead of refusing the file.")
    rollout_shuffle: bool = opt("rollout", False, "Shuffle the prompts of each epoch.")
    rollout_seed: int = opt("rollout", 42, "Seed of the data order.", low=0)
