"""Inputs of decode steps in kept tensors: those of `plan_step`, and only of the last step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.model.attention.base import Segment, StepMetadata, plan_step
from baton.model.attention.row_inputs import RowInputBuffers

PAGE_SIZES = (1, 2, 4, 16)


def _segments(starts: list[int], page_size: int, first_page: int = 0) -> list[Segment]:
    """Rows of one token at `starts`, each on pages of its own; those before `first_page` are left out."""
    tables = [list(range(100 * row + 7, 100 * row + 9 + start // page_size)) for row, start in enumerate(starts)]
    rows = enumerate(zip(starts, tables, strict=True))
    return [Segment(row, start, 1, table[first_page:], first_page=first_page) for row, (start, table) in rows]


def _numbers(step: StepMetadata) -> list[list[int]]:
    return [tensor.tolist() for tensor in (step.token_pages, step.token_slots, step.partial_pages)]


@given(st.data())
def test_each_step_is_that_of_a_plan_made_anew(data: st.DataObject):
    page_size = data.draw(st.sampled_from(PAGE_SIZES))
    buffers = RowInputBuffers(page_size)
    for starts in data.draw(st.lists(st.lists(st.integers(0, 70), min_size=1, max_size=4), min_size=1, max_size=5)):
        segments = _segments(starts, page_size)
        ids = data.draw(st.lists(st.integers(0, 2**40), min_size=len(starts), max_size=len(starts)))
        positions = [start + 3 for start in starts]
        inputs, plan = buffers.fill(ids, positions, segments), plan_step(segments, page_size)
        assert inputs.ids.tolist() == ids
        assert inputs.positions.tolist() == positions
        assert inputs.keep.tolist() == list(range(len(starts)))
        assert _numbers(inputs.step) == _numbers(plan)
        assert inputs.step.segments == plan.segments
        assert inputs.step.page_size == page_size


def test_tables_without_their_first_pages_are_read_as_they_are():
    segments = _segments([9, 12], 4, first_page=2)
    assert _numbers(RowInputBuffers(4).fill([1, 2], [9, 12], segments).step) == _numbers(plan_step(segments, 4))


def test_inputs_can_be_read_by_kernels_and_keep_their_memory():
    buffers = RowInputBuffers(4)
    first = buffers.fill([5, 6], [1, 2], _segments([1, 2], 4))
    tensors = (first.ids, first.positions, first.step.token_pages, first.step.token_slots, first.keep)
    assert all(tensor.dtype is torch.int64 and tensor.is_contiguous() for tensor in tensors)
    buffers.fill([8], [4], _segments([4], 4))
    assert first.ids.tolist() == [5, 6]  # other numbers of rows have memory of their own
    assert buffers.fill([7, 9], [1, 2], _segments([1, 2], 4)).ids.data_ptr() == first.ids.data_ptr()


@pytest.mark.parametrize(
    ("ids", "positions", "segments"),
    [
        ([], [], []),
        ([1, 2], [0, 1], [Segment(0, 0, 2, [3])]),
        ([1], [0, 1], [Segment(0, 0, 1, [3])]),
        ([1], [0], [Segment(0, 0, 2, [3])]),
    ],
)
def test_steps_with_other_than_one_token_a_row_are_refused(
    ids: list[int], positions: list[int], segments: list[Segment]
):
    with pytest.raises(ValueError, match="segment"):
        RowInputBuffers(4).fill(ids, positions, segments)
