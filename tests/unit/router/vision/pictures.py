"""Image files of random pictures, made with Pillow."""

from __future__ import annotations

import base64
import io
import random
from typing import Any

from PIL import Image


def picture(
    width: int,
    height: int,
    format: str = "PNG",
    *,
    mode: str = "RGB",
    seed: int = 0,
    orientation: int = 1,
    **options: Any,
) -> bytes:
    """A file of noise, or of one colour where the mode has no bands of bytes."""
    image = Image.new(mode, (width, height))
    if mode in ("RGB", "RGBA", "L"):
        image.frombytes(random.Random(seed).randbytes(width * height * len(mode)))
    if orientation != 1:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif.tobytes()
    return saved(image, format, **options)


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    """The file of an image."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def coloured(colour: str, width: int = 40, height: int = 40, format: str = "PNG") -> bytes:
    """A file of one colour."""
    return saved(Image.new("RGB", (width, height), colour), format)


def data_url(data: bytes, kind: str = "image/png") -> str:
    """The file as a `data:` URL."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
