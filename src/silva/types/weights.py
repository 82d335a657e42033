"""The weights of one version, as whoever trains them hands them to whoever loads them. Knows no torch.

source = await backend.publish()      # version 7, tensors in memory
await engine.load_weights(source)     # tokens sampled from here on carry version 7
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Shaped(Protocol):
    """A tensor of whatever library; only its shape is read here."""

    @property
    def shape(self) -> Sequence[int]: ...


class WeightSource(Protocol):
    """All parameters of a model at one version, under their Hugging Face names."""

    @property
    def version(self) -> int:
        """The weight version that tokens sampled under these weights carry."""
        ...

    @property
    def folder(self) -> Path | None:
        """The Hugging Face model directory that contains the weights; None where they exist in memory only."""
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter, by name, without reading its values."""
        ...

    def tensors(self) -> Iterator[tuple[str, Shaped]]:
        """Each parameter with its name. May block: a folder reads its files here. Raises ConfigError."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryWeights:
    """Weights in the memory of this process.

    Example: `MemoryWeights(named=model.state_dict(), version=3)`
    """

    named: Mapping[str, Shaped]
    """Each parameter by its Hugging Face name. Nobody may change the tensors until they are loaded."""
    version: int
    """The weight version that tokens sampled under these weights carry."""

    @property
    def folder(self) -> None:
        return None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.named.items()}

    def tensors(self) -> Iterator[tuple[str, Shaped]]:
        return iter(self.named.items())
