"""InternVL: an image is cut into tiles of one size, and a small copy of the whole follows (`GotOcr2ImageProcessor`).

The tiles form the grid whose shape is nearest to the image's; of equally near ones the larger, unless it would blow the
image up to more than twice its area.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from baton.services.router.vision.expansion.config_reader import Json, UnknownProcessor, positive, side_lengths
from baton.services.router.vision.expansion.image_tokens import ImageTokens, with_marks

MAX_TILES = 256
"""Of one image, by the config."""


@dataclass(frozen=True)
class TileRules:
    """`rows_per_tile` of each tile of `tile` (height, width); `start` and `end`: marks around an image."""

    placeholder: int
    start: int
    end: int
    rows_per_tile: int
    tile: tuple[int, int]
    num_tiles: tuple[int, int]
    """Fewest and most tiles."""

    def expand(self, width: int, height: int, *, low_detail: bool = False) -> ImageTokens:
        """See `ImageRules`. There is no pixel bound to halve."""
        return with_marks((self.start,), self.placeholder, self._count(width, height) * self.rows_per_tile, (self.end,))

    @cached_property
    def _grids(self) -> list[tuple[int, int]]:
        """Columns and rows of all grids, by their number of tiles."""
        fewest, most = self.num_tiles
        grids = [(across, down) for across in range(1, most + 1) for down in range(1, most + 1)]
        return sorted(
            (grid for grid in grids if fewest <= grid[0] * grid[1] <= most), key=lambda grid: grid[0] * grid[1]
        )

    def _count(self, width: int, height: int) -> int:
        """Tiles of the best grid; one more for the small copy, if there are several."""
        shape, area, tile_area = width / height, width * height, self.tile[0] * self.tile[1]
        best, smallest = (1, 1), float("inf")
        for across, down in self._grids:
            difference = abs(shape - across / down)
            if difference < smallest or (difference == smallest and area > 0.5 * tile_area * across * down):
                best, smallest = (across, down), difference
        num_tiles = best[0] * best[1]
        return num_tiles + (num_tiles > 1)


def read_internvl(placeholder: int, start: int, end: int, image: Json, processor: Json) -> TileRules:
    """`start`, `end`: ids of the marks. Raises `UnknownProcessor`.

    Images are cut into tiles whatever the image processor's config says, as `InternVLProcessor` calls it.
    """
    fewest, most = positive(image, "min_patches", 1), positive(image, "max_patches", 12)
    if not fewest <= most <= MAX_TILES:
        raise UnknownProcessor(f"its processor cuts images into {fewest} to {most} tiles")
    rows = positive(processor, "image_seq_length", 256)
    return TileRules(placeholder, start, end, rows, side_lengths(image, "size"), (fewest, most))
