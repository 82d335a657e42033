"""Prompts from dataset files.

Consumes a JSON Lines or Parquet file under DataOptions; produces `Prompt`s, each one use of one row: what its agents
get, and the label that only the judges of a session see.

Invariant: which row a position of the run has is a function of the file and the options alone, so a resumed run issues
each (epoch, row) exactly once. All rows are checked before anything starts.

Open `rows.py` first, then `prompts.py`.
"""

from silva.data.options import DataOptions
from silva.data.prompts import Prompt, PromptSource
from silva.data.rows import Dataset, load_dataset

__all__ = ["DataOptions", "Dataset", "Prompt", "PromptSource", "load_dataset"]
