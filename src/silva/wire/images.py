"""Images in requests: the forms in which clients send them, decoded once and named by their digest."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from typing import TypeGuard
from urllib.parse import unquote

from silva.types import Image, JsonObject, RequestError, shown_field

MAX_IMAGE_BYTES = 20 << 20
MAX_URL_CHARS = 8192
_DATA = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.IGNORECASE)
_WEB = re.compile(r"https?://[^\s/?#\0-\x1f\x7f][^\s\0-\x1f\x7f]*", re.IGNORECASE)
_URL_SAFE = str.maketrans("-_", "+/", " \t\r\n\f")
_SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM", b"II*\0", b"MM\0*")
IMAGE_KINDS = ("image_url", "input_image", "image")


def is_image_part(part: object) -> TypeGuard[JsonObject]:
    """Whether a part of a content list says that it is an image, in any protocol's words."""
    return isinstance(part, dict) and part.get("type") in IMAGE_KINDS


class RequestImages:
    """The images of one request: bytes by digest, and the path of each. It lives as long as the body does."""

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}
        self._places: list[tuple[str, str]] = []

    def read(self, part: JsonObject, at: str) -> Image:
        """The image of the part at path `at`. Raises RequestError where it has none that a model could see."""
        image = self._read(part, at)
        self._places.append((at, image.digest))
        return image

    def data(self, digest: str) -> bytes | None:
        """The bytes of an image; None for one that is a web address."""
        return self._data.get(digest)

    def path_of(self, image: Image, message_path: str) -> str:
        """The path of an image in the message at this path."""
        inside = (at for at, digest in self._places if digest == image.digest and at.startswith(message_path))
        return next(inside, message_path)

    def _read(self, part: JsonObject, at: str) -> Image:
        value = part.get("image_url")
        source = part.get("source")
        if isinstance(value, dict):
            value = value.get("url")
        elif value is None and isinstance(source, dict):
            kind = source.get("type")
            if kind == "base64":
                return self._decoded(source.get("data"), source.get("media_type"), at)
            if kind != "url":
                raise _refused(f"its source is of type {shown_field(kind)}; it must be base64 or url", at)
            value = source.get("url")
        if value is None and part.get("file_id") is not None:
            raise _refused(
                "files are not kept here; send the image itself, as a data: URI or a web address", f"{at}.file_id"
            )
        if not isinstance(value, str):
            raise _refused(f"its address is {shown_field(value)}; it must be a data: URI or a web address", at)
        return self._addressed(value, at)

    def _addressed(self, url: str, at: str) -> Image:
        url = url.strip()
        header = _DATA.match(url)
        if header is not None:
            if header[2].lower().rpartition(";")[2].strip() != "base64":
                raise _refused("its data: URI is not in base64", at)
            return self._decoded(url[header.end() :], header[1] or None, at)
        if len(url) > MAX_URL_CHARS:
            raise _refused(f"its address has {len(url)} characters; at most {MAX_URL_CHARS} are accepted", at)
        if _WEB.fullmatch(url) is None:
            raise _refused(f"its address is {shown_field(url)}; it must be a data: URI or begin with http(s)://", at)
        return Image(digest=hashlib.sha256(url.encode()).hexdigest(), url=url)

    def _decoded(self, text: object, media_type: object, at: str) -> Image:
        if media_type is not None and not (isinstance(media_type, str) and media_type.lower().startswith("image/")):
            raise _refused(f"its media type is {shown_field(media_type)}; it must be that of an image", at)
        if not isinstance(text, str):
            raise _refused(f"its data is {shown_field(text)}; it must be text in base64", at)
        data = _from_base64(text)
        if data is None:
            raise _refused("its data is not valid base64", at)
        if len(data) > MAX_IMAGE_BYTES:
            raise _refused(f"it has {len(data)} bytes; at most {MAX_IMAGE_BYTES} are accepted", at)
        if not _is_picture(data):
            said = f" (its media type says {shown_field(media_type)})" if media_type else ""
            raise _refused(f"its bytes are no PNG, JPEG, GIF, WebP, BMP or TIFF{said}", at)
        digest = hashlib.sha256(data).hexdigest()
        self._data[digest] = data
        return Image(digest=digest)


def _from_base64(text: str) -> bytes | None:
    """The bytes; also of text with line breaks, percent escapes or the URL alphabet, or without padding."""
    for form in _spellings(text):
        try:
            return base64.b64decode(form, validate=True)
        except ValueError:
            continue
    return None


def _spellings(text: str) -> Iterator[str]:
    yield text
    plain = (unquote(text) if "%" in text else text).translate(_URL_SAFE).rstrip("=")
    yield plain + "=" * (-len(plain) % 4)


def _is_picture(data: bytes) -> bool:
    """Whether the bytes begin as one of the formats that every image library reads."""
    return data.startswith(_SIGNATURES) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")


def _refused(why: str, at: str) -> RequestError:
    return RequestError(f"the image at {at} cannot be used: {why}", field=at, code="invalid_image")
