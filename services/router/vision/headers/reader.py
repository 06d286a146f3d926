"""Reads the header of an image file by its first bytes. What a client declares does not count."""

from __future__ import annotations

from baton.services.router.vision.headers import jpeg, png
from baton.services.router.vision.headers.image_header import ImageHeader, UnreadableImage
from baton.services.router.vision.headers.jpeg import read_jpeg
from baton.services.router.vision.headers.png import read_png
from baton.services.router.vision.headers.webp import read_webp

ACCEPTED = "send PNG, JPEG or WebP"

_KNOWN = {
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"%PDF": "PDF",
    b"<svg": "SVG",
    b"<?xml": "XML",
    b"\0\0\0\x0cjP  ": "JPEG 2000",
    b"\xffO\xffQ": "JPEG 2000",
}
"""First bytes of what is often sent and not accepted."""


def read_header(data: bytes) -> ImageHeader:
    """Format and size of a still image. Raises `UnreadableImage` for all other data, a size of 0 included."""
    if data.startswith(png.SIGNATURE):
        header = read_png(data)
    elif data.startswith(jpeg.SIGNATURE):
        header = read_jpeg(data)
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        header = read_webp(data)
    else:
        raise UnreadableImage(_why_unknown(data))
    if not header.width or not header.height:
        raise UnreadableImage("has no pixels")
    return header


def _why_unknown(data: bytes) -> str:
    if not data:
        return "is empty"
    name = next((name for start, name in _KNOWN.items() if data.startswith(start)), None)
    if name is None and data[4:8] == b"ftyp":
        name = "HEIF or AVIF"
    return f"is no image that is accepted: {ACCEPTED}" if name is None else f"is {name}: {ACCEPTED}"
