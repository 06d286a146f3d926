"""Makes a step's positions and embeddings from the media spans of its rows. Called by the runner.

Called for every step: a row behind its last image costs one comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from baton.domain.errors import Broken
from baton.domain.media.positions import axis_positions, has_axes, position_offset
from baton.domain.media.span import MediaSpan, shown_spans
from baton.engine.batch import Row
from baton.model.to_device import int64_tensor
from baton.model.vision.embedding import Embeds, MediaEmbedding


class EmbeddingSource(Protocol):
    """Gives the embeddings of the items that a step's rows need."""

    def get(self, identity: bytes) -> MediaEmbedding | None:
        """The embedding of an item; None if it is not here."""
        ...


def step_positions(rows: Sequence[Row]) -> list[int] | tuple[list[int], list[int], list[int]]:
    """Positions of all new tokens: one list where no token differs between axes, as in every step of decode."""
    if not any(has_axes(row.start, row.start + len(row.tokens), row.media) for row in rows):
        positions: list[int] = []
        for row in rows:
            offset = position_offset(row.start, row.media)
            if row.parents:
                positions += [offset + position for position in row.positions()]
                continue
            first = row.start + offset
            positions.extend(range(first, first + len(row.tokens)))
        return positions
    axes: tuple[list[int], list[int], list[int]] = ([], [], [])
    for row in rows:
        if row.parents:  # behind its images, where all axes are equal
            offset = position_offset(row.start, row.media)
            for axis in axes:
                axis.extend([offset + position for position in row.positions()])
            continue
        own = axis_positions(row.start, row.start + len(row.tokens), row.media)
        for axis, more in zip(axes, own, strict=True):
            axis.extend(more)
    return axes


def row_blocks(row: Row) -> tuple[tuple[int, int], ...]:
    """Places of the images among the new tokens of a row, of a model whose images see all of themselves.

    Raises `Broken` for one that the row cuts: its first tokens would miss the keys of the others.
    """
    start, end = row.start, row.start + len(row.tokens)
    blocks = tuple((span.first, span.end) for span in row.media if span.first < end and start < span.end)
    if blocks and blocks[-1][1] > end:
        raise Broken(f"{row.id}: a step ends at {end}, inside the image at {blocks[-1][0]}")
    return blocks


def step_embeds(rows: Sequence[Row], source: EmbeddingSource | None, device: torch.device) -> Embeds | None:
    """Embeddings for the new tokens that stand for rows of images; None if there are none.

    Raises `Broken` for an item without an embedding: the scheduler put its row into the step too soon.
    """
    places: list[int] = []
    parts: list[MediaEmbedding] = []
    for place, span, first, last in _shown(rows):
        item = None if source is None else source.get(span.identity)
        if item is None or len(item.rows) < span.first_row + span.num_tokens:
            raise Broken(f"no embedding of media {span.identity.hex()} where a step needs it")
        places.extend(range(place, place + last - first))
        rows_of_item = slice(span.first_row + first - span.first, span.first_row + last - span.first)
        parts.append(MediaEmbedding(item.rows[rows_of_item], tuple(layer[rows_of_item] for layer in item.deep)))
    if not parts:
        return None
    deep = zip(*(part.deep for part in parts), strict=True)
    return Embeds(
        int64_tensor(places, device),
        torch.cat([part.rows for part in parts]),
        tuple(torch.cat(layer) for layer in deep),
    )


def _shown(rows: Sequence[Row]) -> Iterator[tuple[int, MediaSpan, int, int]]:
    """Parts of spans among the new tokens: place of the first in the step, the span, and the tokens [first, last)."""
    at = 0
    for row in rows:
        start, end = row.start, row.start + len(row.tokens)
        for span, first, last in shown_spans(row.media, start, end):
            yield at + first - start, span, first, last
        at += end - start
