"""Limits of the images of one request. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from baton.services.router.vision.headers.image_header import ImageHeader, UnreadableImage


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """`max_image_bytes` of a file, `max_pixels` by its header, `max_aspect` of the longer side to the shorter one.

    `max_images` and `max_request_bytes` of a request, the same image sent twice counted twice.
    """

    max_image_bytes: int = 10 * 1024 * 1024
    max_images: int = 16
    max_request_bytes: int = 32 * 1024 * 1024
    max_pixels: int = 16 * 1024 * 1024
    max_aspect: int = 200

    def check(self, header: ImageHeader) -> None:
        """Raises `UnreadableImage` for an image of too many pixels, or too narrow."""
        width, height = header.width, header.height
        if width * height > self.max_pixels:
            raise UnreadableImage(f"has {width} x {height} pixels; {self.max_pixels} are the most")
        if max(width, height) > self.max_aspect * min(width, height):
            raise UnreadableImage(f"has {width} x {height} pixels; no side may be {self.max_aspect} times the other")
