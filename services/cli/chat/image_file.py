"""Reads an image file for a message of `baton chat`, as the router will: by its first bytes, under its limits."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from baton.services.router.vision.headers.image_header import UnreadableImage
from baton.services.router.vision.headers.reader import read_header
from baton.services.router.vision.limits import ImageLimits


def read_image_part(file: Path) -> dict[str, Any]:
    """The part of a message that shows the image in `file`, with a `data:` URL. Raises `ValueError` with the reason."""
    limits = ImageLimits()
    try:
        path = file.expanduser()
        if path.exists() and not path.is_file():  # a pipe or a terminal would be waited for
            raise ValueError(f"{file} is no regular file")
        with path.open("rb") as opened:
            data = opened.read(limits.max_image_bytes + 1)
    except (OSError, RuntimeError) as error:  # RuntimeError: a home that is not known
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{file}: {why}") from None
    if len(data) > limits.max_image_bytes:
        raise ValueError(f"{file} has more than {limits.max_image_bytes >> 20} MiB, the most for an image")
    try:
        header = read_header(data)
        limits.check(header)
    except UnreadableImage as error:
        raise ValueError(f"{file} {error}") from None
    url = f"data:image/{header.format.lower()};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
