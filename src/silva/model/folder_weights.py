"""The weights of a Hugging Face model directory as a WeightSource."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from silva.model.checkpoint import load_weights, open_weight_files

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderWeights:
    """Weights in the safetensors files of a directory, such as the start model or a checkpoint.

    Example: `FolderWeights(folder=Path("runs/a/checkpoints/step_000012"), version=12)`
    """

    folder: Path
    """The model directory: `model.safetensors`, or shards with their index."""
    version: int
    """The weight version that tokens sampled under these weights carry."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Reads the heads of the files only. Raises ConfigError for a file that is missing or cut off."""
        return {
            name: tuple(file.get_slice(name).get_shape())
            for _, file in open_weight_files(self.folder)
            for name in file.keys()  # noqa: SIM118  (a safetensors file is no mapping)
        }

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors on the CPU. Raises ConfigError for a file that cannot be read."""
        return iter(load_weights(self.folder).items())
