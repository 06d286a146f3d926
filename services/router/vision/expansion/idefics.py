"""Idefics3 and SmolVLM: an image is cut into square tiles, each with a mark of its row and column, and a small copy of
the whole follows (`Idefics3Processor`, arXiv 2408.12637).

An image is first resized so that its longer side has the processor's length, then so that tiles fill both sides; the
arithmetic, its rounding included, is that of `Idefics3ImageProcessor`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.domain.arithmetic import ceil_div
from baton.services.router.vision.expansion.config_reader import Json, UnknownProcessor, positive
from baton.services.router.vision.expansion.image_tokens import ImageTokens

LONGEST_SIDE = 4096
"""Pixels. The processors' own bound, whatever their config says."""

MAX_TILES = 256
"""Of one image, by the config."""

Ids = tuple[int, ...]


class Encode(Protocol):
    """Token ids of a text."""

    def __call__(self, text: str, /, *, add_special_tokens: bool) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class MarkTexts:
    """Texts of the placeholder, of the mark around images, and of that before the copy of the whole."""

    image: str = "<image>"
    around: str = "<fake_token_around_image>"
    whole: str = "<global-img>"


@dataclass(frozen=True, slots=True)
class TileTokens:
    """Ids before the rows of each tile, by its row and column; of the copy of the whole; and behind an image.

    `alone`: before an image that is one tile. Ends of lines are in front of the mark that follows them.
    """

    tiles: tuple[tuple[Ids, ...], ...]
    whole: Ids
    alone: Ids
    end: Ids


@dataclass(frozen=True, slots=True)
class SplitRules:
    """`rows_per_tile` of each tile of `tile` pixels a side. `longest`: of a resized image. `splits`: into tiles."""

    placeholder: int
    rows_per_tile: int
    tile: int
    longest: int
    splits: bool
    marks: TileTokens

    def expand(self, width: int, height: int, *, low_detail: bool = False) -> ImageTokens:
        """See `ImageRules`. The bound is a length, so half of the pixels are a side shorter by the root of 2."""
        longest = half_length(self.longest, self.tile) if low_detail else self.longest
        down, across = self._count(height, width, longest) if self.splits else (1, 1)
        if down * across == 1:
            return self._lay_out([self.marks.alone])
        tiles = [self.marks.tiles[row][column] for row in range(down) for column in range(across)]
        return self._lay_out([*tiles, self.marks.whole])

    def _lay_out(self, marks: Sequence[Ids]) -> ImageTokens:
        ids: list[int] = []
        runs = []
        for mark in marks:
            ids += mark
            runs.append((len(ids), self.rows_per_tile))
            ids += (self.placeholder,) * self.rows_per_tile
        return ImageTokens((*ids, *self.marks.end), tuple(runs))

    def _count(self, height: int, width: int, longest: int) -> tuple[int, int]:
        """Tiles down and across."""
        height, width = _resized(height, width, longest)
        shape = width / height
        if width >= height:
            across = ceil_div(width, self.tile)
            return ceil_div(int(across * self.tile / shape), self.tile), across
        down = ceil_div(height, self.tile)
        return down, ceil_div(int(down * self.tile * shape), self.tile)


def half_length(longest: int, tile: int) -> int:
    """The longest side that has half of the pixels; a tile at least, if `longest` is not less."""
    return min(longest, max(tile, math.isqrt(longest**2 // 2)))


def _resized(height: int, width: int, longest: int) -> tuple[int, int]:
    """Height and width after the first resizing. The shorter side becomes even, so it may be the longer one by 1."""
    shape = width / height
    if width >= height:
        width, height = longest, _even(int(longest / shape))
    else:
        height, width = longest, _even(int(longest * shape))
    height, width = max(height, 1), max(width, 1)
    shape = width / height
    if width >= height and width > LONGEST_SIDE:
        width, height = LONGEST_SIDE, int(LONGEST_SIDE / shape)
    elif height > width and height > LONGEST_SIDE:
        height, width = LONGEST_SIDE, int(LONGEST_SIDE * shape)
    return max(height, 1), max(width, 1)


def _even(length: int) -> int:
    return length + length % 2


def read_idefics(
    placeholder: int, image: Json, processor: Json, config: Json, texts: MarkTexts, encode: Encode
) -> SplitRules:
    """`config`: the model's. Raises `UnknownProcessor`."""
    splits = image.get("do_image_splitting", True)
    if not image.get("do_resize", True) or not isinstance(splits, bool):
        raise UnknownProcessor("its processor does not resize images, or splits them in a way that is not known")
    longest = positive(image.get("size") or {"longest_edge": 4 * 364}, "longest_edge")
    tile = positive(image.get("max_image_size") or {"longest_edge": 364}, "longest_edge")
    rows = positive(processor, "image_seq_len", 169)
    patch, scale = positive(config.get("vision_config") or {}, "patch_size", 32), positive(config, "scale_factor", 2)
    side = tile // patch
    if side % scale or rows != (side // scale) ** 2:
        raise UnknownProcessor(f"its processor has {rows} rows for a tile of {side} x {side} patches, {scale} merged")
    per_side = ceil_div(min(longest, LONGEST_SIDE), tile) + 1  # rounding may add one
    if per_side**2 > MAX_TILES:
        raise UnknownProcessor(f"its processor cuts images into up to {per_side**2} tiles")
    marks = _read_marks(placeholder, texts, encode, per_side if splits else 0)
    return SplitRules(placeholder, rows, tile, longest, splits, marks)


def _read_marks(placeholder: int, texts: MarkTexts, encode: Encode, per_side: int) -> TileTokens:
    """The marks as the tokenizer encodes them between placeholders: a line's end is text, and so may be a place."""

    def between(text: str) -> Ids:
        ids = tuple(encode(f"{texts.image}{text}{texts.image}", add_special_tokens=False))
        if len(ids) < 3 or (ids[0], ids[-1]) != (placeholder, placeholder) or placeholder in ids[1:-1]:
            raise UnknownProcessor(f"its tokenizer does not keep {texts.image} apart from {text!r}")
        return ids[1:-1]

    def before(row: int, column: int) -> Ids:
        line_end = "\n" if row and not column else ""
        return between(f"{line_end}{texts.around}<row_{row + 1}_col_{column + 1}>")

    tiles = tuple(tuple(before(row, column) for column in range(per_side)) for row in range(per_side))
    whole = between(f"\n\n{texts.around}{texts.whole}")
    return TileTokens(tiles, whole, between(texts.around + texts.whole), between(texts.around))
