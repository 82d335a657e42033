"""The images of a run: one file for each, named by the digest of its bytes, in `RUN_DIR/media`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from silva.store.files import whole_file
from silva.types import Image, Media, StorageFault

MEDIA_DIR = "media"


class MediaStore:
    """Keeps image bytes in files and nothing of them in memory. A file appears whole or not at all, and never changes.

    The same image is written once, however many sessions send it. Used from one event loop; disk work leaves it.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    async def missing(self, images: Sequence[Image]) -> list[str]:
        """The digests of those images that need a file and have none."""
        digests = dict.fromkeys(image.digest for image in images if image.url is None)
        if not digests:
            return []
        return await asyncio.to_thread(lambda: [name for name in digests if not (self._folder / name).exists()])

    async def keep(self, images: Mapping[str, bytes]) -> None:
        """Write these bytes, by their digest. When this returns they are on the disk. StorageFault where they cannot
        be."""
        if not images:
            return
        try:
            await asyncio.to_thread(self._write_all, images)
        except OSError as error:
            why = error.strerror or error
            raise StorageFault(f"an image cannot be written to {self._folder}: {why}; make room there") from error

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
                with whole_file(path) as file:
                    file.write(data)
