"""Reads the header of a JPEG file (ITU-T T.81, annex B). Walks its segments up to the first scan.

Data may follow the end of the image: cameras put previews and depth maps there.
"""

from __future__ import annotations

import struct

from baton.services.router.vision.headers.exif import PREFIX, read_orientation
from baton.services.router.vision.headers.image_header import ImageHeader, UnreadableImage

SIGNATURE = b"\xff\xd8\xff"
MAX_SEGMENTS = 4096
"""Before the first scan."""

END_OF_IMAGE = b"\xff\xd9"
_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
"""Baseline, extended sequential, progressive."""

_OTHER_FRAMES = frozenset(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN, _APP1 = 0xDA, 0xE1
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})
"""Markers without a length."""


def read_jpeg(data: bytes) -> ImageHeader:
    """The header. Raises `UnreadableImage` if the file is damaged or truncated, or of a kind that is not decoded."""
    at, size, orientation = 2, None, 1
    for _ in range(MAX_SEGMENTS):
        marker, at = _next_marker(data, at)
        if marker in _ALONE:
            continue
        if at + 2 > len(data):
            raise UnreadableImage("is truncated")
        (length,) = struct.unpack_from(">H", data, at)
        segment, at = data[at + 2 : at + length], at + length
        if length < 2 or marker in (0xD8, 0xD9):
            raise UnreadableImage("has a damaged header")
        if at > len(data):
            raise UnreadableImage("is truncated")
        if marker == _SCAN:
            break
        if marker in _OTHER_FRAMES:
            raise UnreadableImage("is a JPEG of a kind that is not accepted: only baseline and progressive are")
        if marker in _FRAMES:
            if size is not None or len(segment) < 6:
                raise UnreadableImage("has a damaged header")
            height, width = struct.unpack_from(">xHH", segment)
            size = width, height
        elif marker == _APP1 and segment.startswith(PREFIX):
            orientation = read_orientation(segment)
    else:
        raise UnreadableImage("has too many parts")
    if size is None:
        raise UnreadableImage("has a damaged header")
    if data.find(END_OF_IMAGE, at) < 0:
        raise UnreadableImage("is truncated")
    return ImageHeader("JPEG", *size, orientation)


def _next_marker(data: bytes, at: int) -> tuple[int, int]:
    """The marker at `at`, behind fill bytes, and the place behind it."""
    if data[at : at + 1] != b"\xff":
        raise UnreadableImage("is truncated" if at >= len(data) else "has a damaged header")
    rest = data[at : at + 64].lstrip(b"\xff")
    if not rest:
        raise UnreadableImage("is truncated" if at + 64 >= len(data) else "has a damaged header")
    return rest[0], at + len(data[at : at + 64]) - len(rest) + 1
