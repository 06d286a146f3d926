"""Positions from spans equal those that transformers derives from ids and grids, on random layouts."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from baton.domain.media.positions import axis_positions, has_axes, position_offset
from baton.domain.media.span import MediaGrid, MediaSpan
from tests.tiny_workers import REPEATABLE_SETTINGS

IMAGE = b"i" * 16
MERGE = 2
"""Patches on a side of the square that becomes one token."""

Layout = tuple[int, list[MediaSpan]]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Number of tokens and spans of a prompt of up to three images, with at least one token of text between them."""
    num_tokens, media = draw(st.integers(0, 5)), []
    for _ in range(draw(st.integers(0, 3))):
        grid = draw(st.builds(MediaGrid, st.integers(1, 5), st.integers(1, 5)))
        span = MediaSpan(num_tokens, grid.height * grid.width, IMAGE, grid)
        media.append(span)
        num_tokens = span.end + draw(st.integers(1, 5))
    return num_tokens + 1, media


def stock_positions(model: Any, num_tokens: int, media: list[MediaSpan]) -> tuple[torch.Tensor, int]:
    """Positions [3, tokens] and the offset of generated tokens, as transformers derives them."""
    kinds = torch.zeros(1, num_tokens, dtype=torch.long)
    for span in media:
        kinds[0, span.first : span.end] = 1
    grids = [(1, span.grid.height * MERGE, span.grid.width * MERGE) for span in media if span.grid is not None]
    vision_config = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=2)
    holder = SimpleNamespace(config=SimpleNamespace(vision_config=vision_config))
    holder.get_vision_position_ids = partial(model.get_vision_position_ids, holder)
    positions, deltas = model.get_rope_index(
        holder, torch.zeros(1, num_tokens, dtype=torch.long), kinds, torch.tensor(grids).reshape(-1, 3)
    )
    return positions[:, 0], int(deltas[0, 0])


@pytest.mark.parametrize("model", [Qwen2VLModel, Qwen2_5_VLModel, Qwen3VLModel])
@REPEATABLE_SETTINGS
@given(layouts())
def test_positions_and_offset_are_those_of_transformers(model: Any, layout: Layout):
    num_tokens, media = layout
    expected, offset = stock_positions(model, num_tokens, media)
    assert list(axis_positions(0, num_tokens, media)) == expected.tolist()
    assert position_offset(num_tokens, media) == position_offset(num_tokens + 7, media) == offset


@REPEATABLE_SETTINGS
@given(layouts(), st.data())
def test_any_part_has_the_positions_of_the_whole(layout: Layout, data: st.DataObject):
    num_tokens, media = layout
    end = data.draw(st.integers(0, num_tokens + 3))
    start = data.draw(st.integers(0, end))
    whole = axis_positions(0, num_tokens + 3, media)
    part = axis_positions(start, end, media)
    assert part == tuple(axis[start:end] for axis in whole)
    if not has_axes(start, end, media):
        places = range(start, end)
        assert part == (text := [place + position_offset(place, media) for place in places], text, text)


@REPEATABLE_SETTINGS
@given(layouts())
def test_no_position_lies_behind_its_place(layout: Layout):
    """So tables of cosines that cover all places cover all positions."""
    num_tokens, media = layout
    assert all(
        position <= place for axis in axis_positions(0, num_tokens, media) for place, position in enumerate(axis)
    )


def test_spans_without_a_grid_are_counted_as_text():
    media = [MediaSpan(1, 4, IMAGE)]
    assert axis_positions(0, 6, media) == ([0, 1, 2, 3, 4, 5],) * 3
    assert not has_axes(0, 6, media)
    assert position_offset(6, media) == 0
