"""A sequence's row in the decode scheduler, in whichever queue it is. Owned by the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.request import EngineRequest
from baton.domain.timing.row_timer import RowTimer
from baton.kv.growth import RowGrowth
from baton.kv.page_table import PageTable


@dataclass(slots=True)
class DecodeRow:
    """The row's tokens, prompt and output, and where their KV lies. `arrival_number`: order of arrival.

    `num_filled`: positions whose KV is in place. `host_slots`: of its pages while it is preempted.
    """

    arrival_number: int
    request: EngineRequest
    table: PageTable
    tokens: list[int]
    num_filled: int
    timer: RowTimer
    host_slots: tuple[int, ...] = ()

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.request.num_prompt_tokens

    def growth(self) -> RowGrowth:
        """The row as the growth reserve sees it."""
        num_output, pages = self.num_output_tokens, self.table.pages
        max_rest = self.request.stop.max_tokens - num_output
        return RowGrowth(len(self.tokens), num_output, max_rest, len(pages), self.table.num_own_pages)
