"""The header of an image file, and the error of one that is not accepted. Values only."""

from __future__ import annotations

from dataclasses import dataclass

TURNED = frozenset({5, 6, 7, 8})
"""Orientations (EXIF) that swap width and height."""


class UnreadableImage(ValueError):
    """A file that is not accepted. The message is our own, to follow "the image"; it repeats nothing of the file."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """`format`: PNG, JPEG or WEBP. `width` and `height` in pixels, as stored. `orientation`: of EXIF, 1 to 8."""

    format: str
    width: int
    height: int
    orientation: int = 1

    @property
    def shown_size(self) -> tuple[int, int]:
        """Width and height as the picture is to be shown, and as a decoder that heeds the orientation gives it."""
        return (self.height, self.width) if self.orientation in TURNED else (self.width, self.height)
