"""Inputs of a step of decode on the CPU: one token a row, in tensors that are kept from step to step.

Called by the runner. After a step over all weights, each first call into torch or numpy finds its code out of the CPU's
caches. So these tensors are made once for each number of rows and then filled through an array.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.model.attention.base import Segment, StepMetadata
from baton.model.to_device import int64_tensor

_NUM_COLUMNS = 4


@dataclass(frozen=True, slots=True)
class RowTensors:
    """[rows], int64: `ids` and `positions` of the tokens, `keep`: the places of the logits, all of them; the step."""

    ids: torch.Tensor
    positions: torch.Tensor
    keep: torch.Tensor
    step: StepMetadata


class _Memory:
    """Memory of one number of rows: ids, positions, pages and slots behind each other."""

    def __init__(self, num_rows: int) -> None:
        self.numbers = array("q", [0]) * (_NUM_COLUMNS * num_rows)
        self.tensors = torch.frombuffer(self.numbers, dtype=torch.int64).view(_NUM_COLUMNS, num_rows).unbind(0)
        self.keep = torch.arange(num_rows)


class RowInputBuffers:
    """Fills the inputs of one step after another, over one pool of pages. Owned by the engine thread.

    A step's tensors have its values until the next `fill` with as many rows.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._by_rows: dict[int, _Memory] = {}
        self._no_pages = int64_tensor([])

    def fill(self, ids: Sequence[int], positions: Sequence[int], segments: Sequence[Segment]) -> RowTensors:
        """The inputs of a step: as many `ids` and `positions` as `segments` of one token each, at least one.

        Raises `ValueError` for any other step. The step is that of `plan_step`.
        """
        if not segments or not len(ids) == len(positions) == len(segments):
            raise ValueError(f"{len(ids)} tokens at {len(positions)} positions in {len(segments)} segments")
        pages, slots, begun = list[int](), list[int](), list[int]()
        for segment in segments:
            if segment.num_tokens != 1:
                raise ValueError(f"a segment of {segment.num_tokens} tokens in a step of one a row")
            place, slot = divmod(segment.start, self._page_size)
            page = segment.pages[place - segment.first_page]
            pages.append(page)
            slots.append(slot)
            if slot == 0 and self._page_size > 1:
                begun.append(page)
        memory = self._by_rows.get(len(segments))
        if memory is None:
            memory = self._by_rows[len(segments)] = _Memory(len(segments))
        memory.numbers[:] = array("q", [*ids, *positions, *pages, *slots])
        filled_ids, filled_positions, token_pages, token_slots = memory.tensors
        partial_pages = int64_tensor(begun) if begun else self._no_pages
        step = StepMetadata(tuple(segments), self._page_size, token_pages, token_slots, partial_pages)
        return RowTensors(filled_ids, filled_positions, memory.keep, step)
