"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images keep their shape, at sizes that patches fill (`Qwen2VLImageProcessor`).

Both sides become multiples of a merged patch, the area lies within the bounds of the processor; the arithmetic, its
rounding included, is `smart_resize` of Qwen2-VL (arXiv 2409.12191).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.domain.media.span import MediaGrid
from baton.services.router.vision.expansion.config_reader import Json, UnknownProcessor, positive
from baton.services.router.vision.expansion.image_tokens import ImageTokens, one_run


@dataclass(frozen=True, slots=True)
class PatchRules:
    """`side`: pixels of a merged patch, which is one row. `min_pixels`, `max_pixels`: of a resized image."""

    placeholder: int
    side: int
    min_pixels: int
    max_pixels: int

    def expand(self, width: int, height: int, *, low_detail: bool = False) -> ImageTokens:
        """See `ImageRules`."""
        max_pixels = max(self.min_pixels, self.max_pixels // 2) if low_detail else self.max_pixels
        rows, columns = self._count(height, width, max_pixels)
        return one_run(self.placeholder, rows * columns, MediaGrid(rows, columns))

    def _count(self, height: int, width: int, max_pixels: int) -> tuple[int, int]:
        """Merged patches down and across."""
        side = self.side
        rows, columns = round(height / side), round(width / side)  # to even at a half, as there
        if rows * side * columns * side > max_pixels:
            shrink = math.sqrt((height * width) / max_pixels)
            return max(1, math.floor(height / shrink / side)), max(1, math.floor(width / shrink / side))
        if rows * side * columns * side < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            return math.ceil(height * grow / side), math.ceil(width * grow / side)
        return rows, columns


def read_qwen(placeholder: int, image: Json) -> PatchRules:
    """`image`: the image processor's config. Raises `UnknownProcessor`."""
    size = image.get("size") or {}
    bounds = {
        "shortest_edge": image.get("min_pixels") or size.get("shortest_edge"),
        "longest_edge": image.get("max_pixels") or size.get("longest_edge"),
    }
    lowest, highest = positive(bounds, "shortest_edge", 56 * 56), positive(bounds, "longest_edge", 28 * 28 * 1280)
    side = positive(image, "patch_size", 14) * positive(image, "merge_size", 2)
    if not image.get("do_resize", True) or lowest > highest:
        raise UnknownProcessor("its processor does not resize images to its bounds")
    return PatchRules(placeholder, side, lowest, highest)
