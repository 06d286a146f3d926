"""Held embeddings: a byte that changes among the rows of a step is seen, on whatever layer it lies."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.media.exported_embedding import PART_BYTES
from baton.engine.media.settled_embedding import SettledEmbedding
from baton.model.vision.embedding import MediaEmbedding


def settled(num_rows: int, hidden: int, depth: int, dtype: torch.dtype = torch.float32) -> SettledEmbedding:
    rows, *deep = (torch.randn(num_rows, hidden).to(dtype) for _ in range(1 + depth))
    return SettledEmbedding.settle(MediaEmbedding(rows, tuple(deep)))


def flip(embedding: SettledEmbedding, layer: int, row: int, at: int, bit: int = 0) -> None:
    """Changes a bit of byte `at` of a row."""
    embedding.layers.view(torch.uint8)[layer, row, at] ^= 1 << bit


@given(st.data())
def test_every_changed_bit_among_the_rows_of_a_step_is_seen(data: Any):
    num_rows, hidden, depth = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 7)), data.draw(st.integers(0, 3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    one = settled(num_rows, hidden, depth, dtype)
    row = data.draw(st.integers(0, num_rows - 1))
    first, end = data.draw(st.integers(0, row)), data.draw(st.integers(row + 1, num_rows))
    assert one.is_intact(first, end)
    flip(one, data.draw(st.integers(0, depth)), row, data.draw(st.integers(0, hidden * dtype.itemsize - 1)), 6)
    assert not one.is_intact(first, end)


def test_rows_and_deep_rows_are_those_that_are_compared():
    one = settled(3, 4, 2)
    one.deep[1][2, 3] += 1
    assert not one.is_intact(2, 3)
    other = settled(3, 4, 2)
    other.rows[0, 0] += 1
    assert not other.is_intact(0, 1)


def test_only_the_parts_of_the_rows_are_compared():
    """A row of 256 KiB: four to a part. Rows 0 to 3 are part 0; of the second layer part 2 holds rows 0 to 3."""
    one = settled(8, PART_BYTES // 16, 1)
    assert len(one.digests) == 4
    flip(one, 1, 5, 0)
    found = [one.is_intact(row, row + 1) for row in range(8)]
    assert found == [True] * 4 + [False] * 4
    assert [one.is_intact(0, 4), one.is_intact(3, 5)] == [True, False]


def test_parts_that_layers_share_are_compared():
    """Three layers of 1.5 parts: the middle of every second part is where a layer ends."""
    for layer, row, seen in ((0, 5, (4, 6)), (1, 0, (4, 6)), (1, 0, (0, 1)), (2, 5, (5, 6))):
        one = settled(6, PART_BYTES // 16, 2)
        flip(one, layer, row, 0)
        assert not one.is_intact(*seen)


def test_an_embedding_keeps_nothing_of_what_it_was_made_of():
    rows = torch.randn(2, 4)
    one = SettledEmbedding.settle(MediaEmbedding(rows))
    rows.zero_()
    assert one.is_intact(0, 2)
