"""Shows whether a model folder still contains the same model as before."""

from __future__ import annotations

import hashlib
from pathlib import Path

_BLOCK = 1 << 16
_MAX_BLOCKS = 256
_WEIGHTS = ("*.safetensors", "*.bin")


def model_fingerprint(folder: Path) -> str:
    """A digest of the model's config and weights. Raises OSError.

    Of a large file it takes up to 256 blocks, evenly from first to last, and the size: another training step changes
    them all, and reading a large model in full would delay the start.
    """
    digest = hashlib.sha256()
    weights = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    for path in (folder / "config.json", *weights):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        num = -(-size // _BLOCK)
        with path.open("rb") as file:
            for block in range(min(num, _MAX_BLOCKS)):
                at = block if num <= _MAX_BLOCKS else block * (num - 1) // (_MAX_BLOCKS - 1)
                file.seek(at * _BLOCK)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()
