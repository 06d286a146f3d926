"""Reads `data:` URLs (RFC 2397) of images: base64 only. The declared type is not believed, but must be an image's."""

from __future__ import annotations

import binascii

from baton.services.router.vision.headers.image_header import UnreadableImage

SCHEME = "data:"
MAX_PREFIX_CHARS = 128
"""Of type and parameters."""


def is_data_url(url: str) -> bool:
    """True for a `data:` URL; the scheme is case-insensitive."""
    return url[: len(SCHEME)].lower() == SCHEME


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """The bytes in a `data:` URL. Checks their number before it decodes. Raises `UnreadableImage`."""
    comma = url.find(",", 0, MAX_PREFIX_CHARS)
    if comma < 0:
        raise UnreadableImage("has a data: URL without a type and a comma")
    kind, _, encoding = url[len(SCHEME) : comma].lower().rpartition(";")
    if encoding.strip() != "base64":
        raise UnreadableImage("has a data: URL that is not base64")
    if not kind.lstrip().startswith("image/"):
        raise UnreadableImage("is declared as another type than image/...")
    if 3 * (len(url) - comma - 1) // 4 > max_bytes + 2:
        raise UnreadableImage(f"is over {max_bytes} bytes")
    try:
        data = binascii.a2b_base64(url[comma + 1 :].encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError):
        raise UnreadableImage("is not valid base64") from None
    if len(data) > max_bytes:
        raise UnreadableImage(f"is over {max_bytes} bytes")
    return data
