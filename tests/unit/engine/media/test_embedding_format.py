"""Embeddings as bytes: what goes in comes out, bit for bit, and any other byte is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.media.embedding_format import EmbeddingFormat
from baton.engine.media.exported_embedding import PART_BYTES, part_digests, split_parts
from baton.engine.media.settled_embedding import SettledEmbedding
from baton.model.vision.embedding import MediaEmbedding

CPU = torch.device("cpu")


@given(st.integers(1, 9), st.integers(1, 7), st.integers(0, 3), st.sampled_from(["float32", "bfloat16"]))
def test_an_embedding_comes_back_bit_for_bit(num_rows: int, hidden: int, depth: int, dtype: str):
    shape = EmbeddingFormat(hidden, depth, dtype)
    rows, *deep = (torch.randn(num_rows, hidden).to(getattr(torch, dtype)) for _ in range(1 + depth))
    exported = shape.to_bytes(MediaEmbedding(rows, tuple(deep)))
    assert len(exported.data) == num_rows * shape.row_bytes
    found = shape.from_bytes(bytearray(exported.data), exported.digests, num_rows, CPU)
    assert found.is_intact(0, num_rows), "the digests of the worker that made it"
    settled = SettledEmbedding.settle(MediaEmbedding(rows, tuple(deep)))
    assert settled.digests == exported.digests
    for one, other in zip((rows, *deep), (found.rows, *found.deep), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_rows", [0, 2, 4])
def test_other_numbers_of_bytes_are_refused(num_rows: int):
    shape = EmbeddingFormat(4, 1, "float32")
    with pytest.raises(ValueError, match="bytes for"):
        shape.from_bytes(bytearray(3 * shape.row_bytes), (0,), num_rows, CPU)


@given(st.data())
def test_every_changed_bit_is_seen(data: Any):
    exported = EmbeddingFormat(8, 0, "float32").to_bytes(MediaEmbedding(torch.randn(4, 8)))
    assert exported.is_intact
    exported.data[data.draw(st.integers(0, len(exported.data) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert not exported.is_intact


def test_parts_have_digests_of_their_own():
    data = bytearray(2 * PART_BYTES + 5)
    assert [len(part) for part in split_parts(data)] == [PART_BYTES, PART_BYTES, 5]
    before = part_digests(data)
    data[PART_BYTES] = 1
    assert [old == new for old, new in zip(before, part_digests(data), strict=True)] == [True, False, True]


def test_the_fingerprint_covers_all_that_an_embedding_depends_on():
    shapes = [EmbeddingFormat(8, 0, "float32"), EmbeddingFormat(9, 0, "float32"), EmbeddingFormat(8, 1, "float32")]
    shapes.append(EmbeddingFormat(8, 0, "bfloat16"))
    found = {shape.fingerprint("w", "p") for shape in shapes}
    found |= {shapes[0].fingerprint("other", "p"), shapes[0].fingerprint("w", "other")}
    assert len(found) == 6
    assert shapes[0].fingerprint("w", "p") == EmbeddingFormat(8, 0, "float32").fingerprint("w", "p")
