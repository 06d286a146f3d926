"""Reads the header of a WebP file (RFC 9649): lossy, lossless or extended. Walks its chunks."""

from __future__ import annotations

import struct

from baton.services.router.vision.headers.exif import read_orientation
from baton.services.router.vision.headers.image_header import ImageHeader, UnreadableImage

MAX_CHUNKS = 1024
_RIFF = struct.Struct("<4sI4s")
_CHUNK = struct.Struct("<4sI")
_ANIMATION = 0x02
_FRAME_START = b"\x9d\x01\x2a"


def read_webp(data: bytes) -> ImageHeader:
    """The header. Raises `UnreadableImage` if the file is damaged, truncated, animated, or goes on behind its end."""
    if len(data) < _RIFF.size:
        raise UnreadableImage("is truncated")
    _, length, _ = _RIFF.unpack_from(data)
    end = 8 + length
    if end > len(data):
        raise UnreadableImage("is truncated")
    if len(data) > end + (end & 1):
        raise UnreadableImage("is followed by other data")
    at, canvas, size, orientation = _RIFF.size, None, None, 1
    for _ in range(MAX_CHUNKS):
        if at >= end:
            break
        if at + _CHUNK.size > end:
            raise UnreadableImage("is truncated")
        name, length = _CHUNK.unpack_from(data, at)
        start, at = at + _CHUNK.size, at + _CHUNK.size + length + (length & 1)
        if start + length > end:
            raise UnreadableImage("is truncated")
        chunk = data[start : start + min(length, 1 << 16)]
        match name:
            case b"VP8X" if canvas is None and size is None:
                canvas = _read_canvas(chunk)
            case b"VP8 " | b"VP8L" if size is None:
                size = _read_lossy(chunk) if name == b"VP8 " else _read_lossless(chunk)
            case b"ANIM" | b"ANMF":
                raise UnreadableImage("is animated")
            case b"VP8X" | b"VP8 " | b"VP8L":
                raise UnreadableImage("has a damaged header")
            case b"EXIF":
                orientation = read_orientation(chunk)
    else:
        raise UnreadableImage("has too many parts")
    if size is None or canvas not in (None, size):
        raise UnreadableImage("has a damaged header")
    return ImageHeader("WEBP", *size, orientation)


def _read_canvas(chunk: bytes) -> tuple[int, int]:
    if len(chunk) < 10:
        raise UnreadableImage("has a damaged header")
    if chunk[0] & _ANIMATION:
        raise UnreadableImage("is animated")
    return 1 + int.from_bytes(chunk[4:7], "little"), 1 + int.from_bytes(chunk[7:10], "little")


def _read_lossy(chunk: bytes) -> tuple[int, int]:
    if len(chunk) < 10 or chunk[0] & 1 or chunk[3:6] != _FRAME_START:  # bit 0: not a key frame
        raise UnreadableImage("has a damaged header")
    width, height = struct.unpack_from("<HH", chunk, 6)
    return width & 0x3FFF, height & 0x3FFF


def _read_lossless(chunk: bytes) -> tuple[int, int]:
    if len(chunk) < 5 or chunk[0] != 0x2F:
        raise UnreadableImage("has a damaged header")
    bits = int.from_bytes(chunk[1:5], "little")
    return 1 + (bits & 0x3FFF), 1 + ((bits >> 14) & 0x3FFF)
