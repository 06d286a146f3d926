"""Positions of a sequence's tokens, derived from its media spans. Pure; never sent.

With three axes (M-RoPE, arXiv 2409.12191) a token of text has the same position on each of them. The rows of an image
begin together: the first axis stands still, the others count its rows and columns. The text behind goes on after the
largest one. So a text token's position is its place in the sequence and an offset, which is never positive.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.domain.media.span import MediaGrid, MediaSpan

Axes = tuple[list[int], list[int], list[int]]
"""Positions on the axes of frames, rows and columns, one list each."""


def axis_positions(start: int, end: int, media: Sequence[MediaSpan]) -> Axes:
    """Positions of the tokens at places [start, end). `media` in order; spans without a grid count as text."""
    axes: Axes = ([], [], [])
    at, offset = start, 0
    for span in media:
        if at >= end:
            break
        if span.grid is None:
            continue
        if at < span.first:
            _add_text(axes, at + offset, min(span.first, end) + offset)
            at = min(span.first, end)
        if span.first <= at < min(span.end, end):
            _add_rows(axes, span.first + offset, span.grid, range(at - span.first, min(span.end, end) - span.first))
            at = min(span.end, end)
        offset += _step(span.grid)
    if at < end:
        _add_text(axes, at + offset, end + offset)
    return axes


def position_offset(place: int, media: Sequence[MediaSpan]) -> int:
    """What to add to the place of a text token, in the prompt or behind it, to get its position on every axis.

    Of a request's spans all have a grid, or none has.
    """
    if not media or media[0].grid is None:
        return 0
    return sum(_step(span.grid) for span in media if span.grid is not None and span.end <= place)


def has_axes(start: int, end: int, media: Sequence[MediaSpan]) -> bool:
    """True if a token at [start, end) has different positions on different axes, or could have."""
    if not media or media[-1].end <= start:
        return False
    return any(span.grid is not None and span.first < end and start < span.end for span in media)


def _step(grid: MediaGrid) -> int:
    """How much less the positions advance over an image than its places."""
    return max(grid.height, grid.width) - grid.height * grid.width


def _add_text(axes: Axes, first: int, end: int) -> None:
    for axis in axes:
        axis.extend(range(first, end))


def _add_rows(axes: Axes, base: int, grid: MediaGrid, rows: range) -> None:
    """Adds embedding rows of an image whose positions begin at `base`."""
    axes[0].extend([base] * len(rows))
    axes[1].extend(base + row // grid.width for row in rows)
    axes[2].extend(base + row % grid.width for row in rows)
