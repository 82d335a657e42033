"""The images of a run: one file for each, named by the digest of its bytes, in `RUN_DIR/media`."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from silva.types.generation import Media
from silva.types.messages import Image

MEDIA_DIR = "media"


class MediaStore:
    """Keeps image bytes in files and nothing of them in memory. A file appears whole or not at all, and never changes.

    The same image is written once, however many sessions send it. Used from one event loop; disk work leaves it.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._known: set[str] = set()

    async def keep(self, images: Mapping[str, bytes]) -> None:
        """Write these bytes, by their digest. When this returns they are on the disk. OSError where they cannot be."""
        new = {digest: data for digest, data in images.items() if digest not in self._known}
        if new:
            await asyncio.to_thread(self._write_all, new)
            self._known.update(new)

    def media(self, images: Sequence[Image]) -> tuple[Media, ...]:
        """The images as an engine takes them."""
        return tuple(
            Media(kind="image", digest=image.digest, url=image.url)
            if image.url is not None
            else Media(kind="image", digest=image.digest, path=self._folder / image.digest)
            for image in images
        )

    def _write_all(self, images: Mapping[str, bytes]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for digest, data in images.items():
            path = self._folder / digest
            if not path.exists():
                _write(path, data)


def _write(path: Path, data: bytes) -> None:
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(partial).chmod(0o644)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
