"""Positions and embeddings of steps whose rows show images."""

from __future__ import annotations

import pytest
import torch

from baton.domain.errors import Broken
from baton.domain.ids import AttemptId, PageId, RequestId
from baton.domain.media.span import MediaGrid, MediaSpan
from baton.engine.batch import Row
from baton.engine.media.step_inputs import step_embeds, step_positions
from baton.model.vision.embedding import MediaEmbedding

RED, BLUE = b"r" * 16, b"b" * 16
CPU = torch.device("cpu")
GRID = MediaSpan(2, 6, RED, MediaGrid(2, 3))
ITEMS = {
    RED: MediaEmbedding(torch.arange(6.0)[:, None], (torch.arange(6.0)[:, None] + 100,)),
    BLUE: MediaEmbedding(-torch.arange(3.0)[:, None], (torch.arange(3.0)[:, None] + 200,)),
}


def row(start: int, num_tokens: int, *media: MediaSpan) -> Row:
    return Row(AttemptId(RequestId("r"), 1), [1] * num_tokens, start, [PageId(0)], None, media=media)


def test_steps_of_text_have_one_axis():
    assert step_positions([row(0, 3), row(7, 1)]) == [0, 1, 2, 7]
    assert step_embeds([row(0, 3), row(7, 1)], None, CPU) is None


def test_text_behind_an_image_has_one_axis_with_an_offset():
    """So a step of decode never needs three axes."""
    assert step_positions([row(8, 2, GRID), row(0, 2, GRID), row(30, 1)]) == [5, 6, 0, 1, 30]


def test_a_step_that_touches_an_image_has_three_axes_for_all_rows():
    assert step_positions([row(30, 1), row(1, 3, GRID)]) == ([30, 1, 2, 2], [30, 1, 2, 2], [30, 1, 2, 3])


def test_rows_of_a_chunk_begin_where_the_chunk_cuts_the_image():
    apart = MediaSpan(1, 1, BLUE), MediaSpan(3, 2, BLUE, first_row=1)
    embeds = step_embeds([row(9, 2), row(4, 3, GRID), row(0, 4, *apart)], ITEMS, CPU)
    assert embeds is not None
    assert embeds.places.tolist() == [2, 3, 4, 6, 8]
    assert embeds.rows.flatten().tolist() == [2, 3, 4, 0, -1]
    assert [one.flatten().tolist() for one in embeds.deep] == [[102, 103, 104, 200, 201]]


def test_a_missing_or_short_embedding_ends_the_engine():
    """The scheduler put the row into a step too soon: no token may be computed without its rows."""
    for media, source in ((GRID, None), (GRID, {}), (MediaSpan(0, 4, BLUE), ITEMS)):
        with pytest.raises(Broken, match="no embedding of media"):
            step_embeds([row(2, 1, media)], source, CPU)
