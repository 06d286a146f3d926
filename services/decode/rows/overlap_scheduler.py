"""The decode scheduler with one step in flight while the next one is built. Pure, like the scheduler it extends.

The step ahead takes one thing for granted: that no row ends by the token of the step in flight. Ends by length are
known before, and such rows are left out. After any other end, or an abort, the row's part of the step ahead is dropped:
its token is never emitted, its KV never counts, and its pages wait behind a `PageFence` for that step to end.

Everything else is decided between steps, by the plain scheduler: preemption, resumption, chunks of local prompts,
drafts, and rows that need the token on the host. `schedule_ahead` then gives None.

With `unsettled` the pages of a step get their digests beside the engine thread, and are cached when the next step is
committed: `settle_filled`.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from baton.domain.errors import Broken
from baton.domain.ids import AttemptId, PageKey
from baton.engine.batch import Batch, Row, SampleSpec, StepOutput
from baton.engine.chunking import ChunkBudget
from baton.engine.overlap.future import UNREAD_TOKEN, FutureToken, UnreadHistory, needs_known_tokens
from baton.engine.overlap.page_fence import PageFence
from baton.engine.transition_log import log_transition
from baton.kv.page_table import PageTable
from baton.kv.swap_space import SwapSpace
from baton.services.decode.effects import DecodeEffect
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import DecodeRow
from baton.services.decode.rows.rules import RowRules
from baton.services.decode.rows.unsettled_pages import UnsettledPages, UnsettledRows
from baton.services.decode.scheduler import DecodeScheduler


@dataclass(frozen=True, slots=True)
class _StepRows:
    """A step in flight and the rows it was built for. An attempt's id may come again, a row does not."""

    batch: Batch
    rows: Mapping[AttemptId, DecodeRow]
    scheduled_at: float


class OverlapScheduler(DecodeScheduler):
    """Every batch that it gives is started, in order, and committed in the same order."""

    def __init__(
        self,
        imports: ImportTable,
        host: SwapSpace,
        page_size: int,
        chunks: ChunkBudget | None,
        rules: RowRules | None,
        fence: PageFence,
    ) -> None:
        super().__init__(imports, host, page_size, chunks, rules)
        self._fence = fence
        self._in_flight: deque[_StepRows] = deque()
        self._ended: _StepRows | None = None  # the step that is being committed
        self._joined: list[DecodeRow] = []  # in the step ahead, not in the one before it
        self._committed_at = 0.0
        self.unsettled: UnsettledRows | None = None  # set where pages are digested beside the engine thread
        self.num_dropped_tokens = 0

    @property
    def num_in_flight(self) -> int:
        """Steps that were scheduled and are not committed: 0-2."""
        return len(self._in_flight)

    def schedule(self, now: float) -> Batch | None:
        """Builds a step when none is in flight. Raises `Broken` if one is."""
        if self._in_flight:
            raise Broken("a step is in flight; the plain scheduler counts on its tokens")
        if self._preempted:
            self.settle_filled()  # pages of a row that has ended may be what they wait for
        batch = super().schedule(now)
        return None if batch is None else self._record(batch, now)

    def schedule_ahead(self, now: float) -> Batch | None:
        """Builds the step behind the one in flight: a token for every row that goes on, and imports that join.

        None without one in flight, and where `schedule` has to decide: the caller first commits that step.
        """
        if len(self._in_flight) != 1 or self._local or self._preempted or self._drafts is not None:
            return None
        futures = self._futures(self._in_flight[0])
        going_on = [row for row in self._running if not _ends_by_length(row, futures)]
        rows = [*going_on, *self._imported]
        if not rows or any(_needs_host(row, futures) for row in rows) or not self._cover(rows, futures):
            return None
        self._scheduled_at = now
        for row in self._imported:
            bisect.insort(self._running, row, key=lambda one: one.arrival_number)
            self._joined.append(row)
            log_transition("row", row.request.id, "join", "running")
        self._imported.clear()
        return self._record(Batch(tuple([self._row_ahead(row, futures) for row in rows])), now)

    def commit(self, batch: Batch, output: StepOutput, now: float) -> list[DecodeEffect]:
        """Applies the oldest step in flight. Raises `Broken` for any other."""
        if not self._in_flight or self._in_flight[0].batch is not batch:
            raise Broken("steps are committed in the order of their start")
        self._ended = self._in_flight.popleft()
        self._fence.on_ended()
        self.settle_filled()
        self._scheduled_at = max(self._ended.scheduled_at, self._committed_at)
        self._committed_at = now
        effects = super().commit(batch, output, now)
        for row in self._joined:  # their first step is the next one
            row.timer.enter(now)
        self._joined.clear()
        return effects

    def settle_filled(self) -> bool:
        """Waits for the digests of the pages that the step committed last has filled, and caches these pages.

        False without any. A page that another row has cached meanwhile replaces the row's own, which the step ahead
        still reads.
        """
        taken = [] if self.unsettled is None else self.unsettled.take()
        for one in taken:
            # The pages of a row that has ended are fenced already.
            num_full, is_read = one.end // self._page_size, not one.has_ended and self._is_in_flight(one.row)
            if is_read and self._takes_reserved(one.table, one.row.tokens, one.end):
                continue
            with self._fence.replacement(one.table, num_full) if is_read else nullcontext():
                one.cache()
            if one.has_ended:
                one.table.release()
        return bool(taken)

    def ruined_ids(self, keys: frozenset[PageKey]) -> list[AttemptId]:
        """See `DecodeScheduler`. What was computed through one of `keys`, or a condemned page, is never cached."""
        for one in self.unsettled or ():
            one.is_ruined |= one.table.holds_condemned() or (bool(keys) and self._used(one.row, keys))
        return super().ruined_ids(keys)

    def _record(self, batch: Batch, now: float) -> Batch:
        here = {row.request.id: row for queue in (self._running, self._local) for row in queue}
        self._in_flight.append(_StepRows(batch, {row.id: here[row.id] for row in batch.rows}, now))
        self._fence.on_started()
        return batch

    def _futures(self, step: _StepRows) -> dict[AttemptId, FutureToken]:
        """Where the next token of each row comes from that is in `step`."""
        rows = enumerate(step.batch.rows)
        here = {row.request.id: row for row in self._running}
        return {row.id: FutureToken(index) for index, row in rows if here.get(row.id) is step.rows[row.id]}

    def _cover(self, rows: list[DecodeRow], futures: Mapping[AttemptId, FutureToken]) -> bool:
        """Extends the rows' page tables by what the step ahead writes.

        False, perhaps with window slots reserved, for too few pages or slots.
        """
        if not all(row.reserve_windows(self._imports.limits.max_row_tokens) for row in rows if row.table.has_windows):
            return False
        ends = [len(row.tokens) + (row.request.id in futures) for row in rows]
        num_missing = sum(row.table.num_missing(end) for row, end in zip(rows, ends, strict=True))
        if num_missing > self._imports.num_reservable_pages:
            return False
        is_covered = all([row.table.extend(end) for row, end in zip(rows, ends, strict=True)])
        for row, end in zip(rows, ends, strict=True):
            row.cover_windows(end)
        return is_covered

    def _row_ahead(self, row: DecodeRow, futures: Mapping[AttemptId, FutureToken]) -> Row:
        request, future = row.request, futures.get(row.request.id)
        if future is None:
            return self._batch_row(row)
        spec = SampleSpec(request.sampling, UnreadHistory(row.tokens), request.num_prompt_tokens)
        tokens, start = (UNREAD_TOKEN,), len(row.tokens)
        return Row(request.id, tokens, start, row.table.pages, spec, media=request.media, future=future)

    def _stepped_rows(self, batch: Batch) -> dict[AttemptId, DecodeRow]:
        rows = {} if self._ended is None else self._ended.rows
        here = {id: row for id, row in super()._stepped_rows(batch).items() if rows.get(id) is row}
        self.num_dropped_tokens += sum(row.sample is not None and row.id not in here for row in batch.rows)
        return here

    def _ensure_page(self, row: DecodeRow) -> bool:
        """Pages of rows that have ended come back before any row is preempted for them."""
        return super()._ensure_page(row) or (self.settle_filled() and super()._ensure_page(row))

    def _settle(self, batch: Batch, ends: list[int], by_id: Mapping[AttemptId, DecodeRow]) -> None:
        if self.unsettled is None:
            return super()._settle(batch, ends, by_id)
        filled: list[UnsettledPages] = []
        for batch_row, end in zip(batch.rows, ends, strict=True):
            row = by_id.get(batch_row.id)
            if row is not None and end // self._page_size > row.num_filled // self._page_size:
                pages = row.table.pages[row.num_filled // self._page_size : end // self._page_size]
                filled.append(UnsettledPages(row, row.table, pages, end))
        return self.unsettled.begin(filled)

    def _advance_row(self, row: DecodeRow, num_filled: int) -> None:
        """A page that another row has cached meanwhile replaces the row's own, which the step ahead still reads."""
        if self.unsettled is not None and self.unsettled.find(row) is not None:
            row.num_filled = num_filled  # cached with their digests
            return
        table, num_full = row.table, num_filled // self._page_size
        if num_full > row.num_filled // self._page_size and self._is_in_flight(row):
            if self._takes_reserved(table, row.tokens, num_filled) or not self._fence.has_slots(table, num_full):
                row.num_filled = num_filled
                return table.pass_windows(num_filled)
            with self._fence.replacement(table, num_full):
                super()._advance_row(row, num_filled)
        else:
            super()._advance_row(row, num_filled)

    def _takes_reserved(self, table: PageTable, tokens: Sequence[int], num_filled: int) -> bool:
        """True if the row cannot cache its pages now: cached ones that replace them would be taken from reservations.

        The row's own come back only after the step that reads them. They are cached with the next page that it fills.
        """
        num_new, num_left = num_filled // self._page_size - len(table.cached_keys), self._imports.num_reservable_pages
        return num_new > num_left and table.num_taken(tokens, num_filled) > num_left

    def _release(self, row: DecodeRow) -> None:
        if self._is_in_flight(row):
            self._fence.hold(row.table.pages)
        unsettled = None if self.unsettled is None else self.unsettled.find(row)
        if unsettled is not None:
            unsettled.take_table(self._page_size)
        super()._release(row)

    def _is_in_flight(self, row: DecodeRow) -> bool:
        return any(step.rows.get(row.request.id) is row for step in self._in_flight)


def _ends_by_length(row: DecodeRow, futures: Mapping[AttemptId, FutureToken]) -> bool:
    """True if the token in flight is the row's last one, whatever it is."""
    return row.request.id in futures and row.num_output_tokens + 1 >= row.request.stop.max_tokens


def _needs_host(row: DecodeRow, futures: Mapping[AttemptId, FutureToken]) -> bool:
    return needs_known_tokens(row.request, row.num_output_tokens + (row.request.id in futures))
