"""Mistral 3 and Pixtral: the rows of an image in lines, each with a mark behind it (`PixtralProcessor`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.domain.arithmetic import ceil_div
from baton.services.router.vision.expansion.config_reader import Json, UnknownProcessor, positive
from baton.services.router.vision.expansion.image_tokens import ImageTokens


@dataclass(frozen=True, slots=True)
class LineRules:
    """`side`: pixels of a merged patch. `longest`: longest side of a resized image. `line_end`, `image_end`: marks."""

    placeholder: int
    line_end: int
    image_end: int
    side: int
    longest: int

    def expand(self, width: int, height: int, *, low_detail: bool = False) -> ImageTokens:
        """See `ImageRules`. The bound is a length, so half of the pixels are a side shorter by the root of 2."""
        longest = max(self.side, math.isqrt(self.longest**2 // 2)) if low_detail else self.longest
        ratio = max(height / longest, width / longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        down, across = ceil_div(max(1, height), self.side), ceil_div(max(1, width), self.side)
        line = (*(self.placeholder,) * across, self.line_end)
        return ImageTokens(
            (*(line * down)[:-1], self.image_end), tuple((at * (across + 1), across) for at in range(down))
        )


def read_pixtral(placeholder: int, line_end: int, image_end: int, image: Json, processor: Json) -> LineRules:
    """`line_end`, `image_end`: ids of the marks. Raises `UnknownProcessor`."""
    side = positive(processor, "patch_size", 16) * positive(processor, "spatial_merge_size", 1)
    if not image.get("do_resize", True):
        raise UnknownProcessor("its processor does not resize images")
    return LineRules(placeholder, line_end, image_end, side, positive(image.get("size") or {}, "longest_edge", 1024))
