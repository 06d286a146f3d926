"""What an image becomes in a prompt, and the interface of the rules for it. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.domain.media.span import MediaGrid, MediaSpan


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Token ids in place of the one that the chat template writes for an image.

    `runs`: (place, rows) of the placeholders among `ids`, in order; all other ids are marks around and between them.
    `grid`: of all rows, for models whose positions have three axes.
    """

    ids: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    grid: MediaGrid | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the image's embedding."""
        return sum(num_rows for _, num_rows in self.runs)

    def spans(self, first: int, identity: bytes) -> list[MediaSpan]:
        """The spans of an image whose tokens begin at place `first` of the prompt."""
        spans, row = [], 0
        for place, num_rows in self.runs:
            spans.append(MediaSpan(first + place, num_rows, identity, self.grid, row))
            row += num_rows
        return spans


class ImageRules(Protocol):
    """Counts and lays out the tokens of images, as the model's image processor does. Immutable.

    `placeholder`: the id that stands for a row, and for an image in the text of the chat template.
    """

    @property
    def placeholder(self) -> int: ...

    def expand(self, width: int, height: int, *, low_detail: bool = False) -> ImageTokens:
        """The tokens of an image of this many pixels. `low_detail`: half of the pixel bound, where there is one."""
        ...


def one_run(placeholder: int, num_rows: int, grid: MediaGrid | None = None) -> ImageTokens:
    """Placeholders without marks."""
    return ImageTokens((placeholder,) * num_rows, ((0, num_rows),), grid)


def with_marks(before: Sequence[int], placeholder: int, num_rows: int, after: Sequence[int]) -> ImageTokens:
    """Placeholders between two marks."""
    return ImageTokens((*before, *(placeholder,) * num_rows, *after), ((len(before), num_rows),))
