"""Media inside a prompt: which tokens stand for rows of an image's embedding, and which image it is.

A request carries its spans to every worker. Page keys and positions follow from them (`baton.kv.keys`,
`baton.domain.media.positions`); the pixels and the embeddings go other ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

IDENTITY_BYTES = 16
"""Of a digest of the media's bytes and of all that its embedding depends on."""

MAX_SPANS = 4096
"""Of one request. Some families show each row of an image as a span of its own."""


@dataclass(frozen=True, slots=True)
class MediaGrid:
    """Rows and columns of an image's embedding, in tokens, for models whose positions have three axes."""

    height: int
    width: int

    def __post_init__(self) -> None:
        """Raises `ValueError` for an empty grid."""
        if self.height < 1 or self.width < 1:
            raise ValueError(f"a grid of {self.height} x {self.width} is empty")


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """The prompt tokens [first, first + num_tokens) stand for rows of one media item's embedding.

    `identity` names the item. The rows are [first_row, first_row + num_tokens): a family that puts marks between the
    rows of an image has a span for each of them. `grid`: of the whole item, which then is one span; None for models
    whose positions have one axis.
    """

    first: int
    num_tokens: int
    identity: bytes
    grid: MediaGrid | None = None
    first_row: int = 0

    def __post_init__(self) -> None:
        """Raises `ValueError` for a span that means nothing."""
        if self.first < 0 or self.num_tokens < 1 or self.first_row < 0:
            raise ValueError(f"a span of {self.num_tokens} tokens from {self.first} on, row {self.first_row}, is none")
        if len(self.identity) != IDENTITY_BYTES:
            raise ValueError(f"an identity has {IDENTITY_BYTES} bytes, not {len(self.identity)}")
        grid = self.grid
        if grid is not None and (self.first_row or grid.height * grid.width != self.num_tokens):
            raise ValueError(f"a grid of {grid.height} x {grid.width} is not a span of {self.num_tokens} tokens")

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.first + self.num_tokens


def shown_spans(media: Sequence[MediaSpan], start: int, end: int) -> Iterator[tuple[MediaSpan, int, int]]:
    """The spans among the tokens [start, end), each with those of its tokens that are: [first, last).

    `media` in order: behind its last span this costs one comparison.
    """
    for span in media if media and media[-1].end > start else ():
        first, last = max(start, span.first), min(end, span.end)
        if first < last:
            yield span, first, last


@dataclass(frozen=True, slots=True)
class MediaRules:
    """What a model asks of spans. `placeholders`: ids that stand for rows; `has_grid`: positions have three axes.

    `block_rows`: of each item, whose tokens attend to all of it, also to those behind them: a span then is a whole
    item, of so many rows, and no step may cut it. None: attention is causal.
    """

    placeholders: frozenset[int]
    has_grid: bool = False
    block_rows: int | None = None

    def find_fault(self, prompt: Sequence[int], media: Sequence[MediaSpan]) -> str | None:
        """What is wrong with the spans of `prompt`, to follow the word "media"; None if nothing is.

        They must be in order and cover exactly the placeholder ids. So no id that a client wrote into its text can
        take the place of a row.
        """
        at = 0
        for span in media:
            if span.first < at or span.end > len(prompt):
                return f"has a span at {span.first} that is out of order or not within the {len(prompt)} prompt tokens"
            if (span.grid is not None) is not self.has_grid:
                return "needs a grid for every span here" if self.has_grid else "has a grid, which this model has not"
            if self.block_rows is not None and (span.first_row, span.num_tokens) != (0, self.block_rows):
                return f"has a span at {span.first} that is no whole item of {self.block_rows} rows"
            if self.block_rows is not None and 0 < span.first == at:
                return f"has a span at {span.first} with no token between it and the one before"
            if fault := self._find_uncovered(prompt, at, span.first):
                return fault
            if not self.placeholders.issuperset(prompt[span.first : span.end]):
                return f"has a span at {span.first} over tokens that are no placeholders"
            at = span.end
        return self._find_uncovered(prompt, at, len(prompt))

    def _find_uncovered(self, prompt: Sequence[int], start: int, end: int) -> str | None:
        found = next((at for at in range(start, end) if prompt[at] in self.placeholders), None)
        return None if found is None else f"has no span for the placeholder at {found}"
