"""Reads the header of a PNG file (W3C PNG, third edition). Walks its chunks; inflates nothing."""

from __future__ import annotations

import struct

from baton.services.router.vision.headers.exif import read_orientation
from baton.services.router.vision.headers.image_header import ImageHeader, UnreadableImage

SIGNATURE = b"\x89PNG\r\n\x1a\n"
MAX_CHUNKS = 1 << 14
"""More than a file of the largest size has that a usual encoder writes."""

_CHUNK = struct.Struct(">I4s")
_SIZE = struct.Struct(">II")


def read_png(data: bytes) -> ImageHeader:
    """The header. Raises `UnreadableImage` if the file is damaged, truncated, animated, or goes on behind its end."""
    at, orientation, has_pixels = len(SIGNATURE), 1, False
    size: tuple[int, int] | None = None
    for _ in range(MAX_CHUNKS):
        if at + _CHUNK.size > len(data):
            raise UnreadableImage("is truncated")
        length, name = _CHUNK.unpack_from(data, at)
        start, at = at + _CHUNK.size, at + _CHUNK.size + length + 4  # 4: its check sum
        if at > len(data):
            raise UnreadableImage("is truncated")
        if (name == b"IHDR") is not (size is None) or (name == b"IHDR" and length != 13):
            raise UnreadableImage("has a damaged header")
        match name:
            case b"IHDR":
                width, height = _SIZE.unpack_from(data, start)
                size = width, height
            case b"acTL":
                raise UnreadableImage("is animated")
            case b"eXIf":
                orientation = read_orientation(data[start : start + length])
            case b"IDAT":
                has_pixels = True
            case b"IEND":
                break
    else:
        raise UnreadableImage("has too many parts")
    if size is None or not has_pixels:
        raise UnreadableImage("has no pixels")
    if at != len(data):
        raise UnreadableImage("is followed by other data")
    return ImageHeader("PNG", *size, orientation)
